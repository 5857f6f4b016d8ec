import sys

from lightning_moe.cli import main

if __name__ == "__main__":
    sys.exit(main())
