"""Stand-ins for ``deep_ep`` on CPU processes: the same calls, layouts, checks and traps as the real generations.

They cannot show races of streams, timeouts, or trouble of builds; ``tests/dispatch/test_real_deep_ep.py`` runs the
same contract on the real kernels.
"""

import sys
from types import ModuleType

import pytest
import torch

from tests.dispatch.deep_ep_standin.v1 import Buffer, Config
from tests.dispatch.deep_ep_standin.v2 import ElasticBuffer, EPHandle

GENERATIONS = ("V1", "V2")


def install(patch: pytest.MonkeyPatch, generation: str) -> ModuleType:
    """Lets ``import deep_ep`` find a stand-in, on a machine that seems to have a GPU, until the patch is undone."""
    module = ModuleType("deep_ep")
    contents = {
        "V1": {"Buffer": Buffer, "Config": Config},
        "V2": {"ElasticBuffer": ElasticBuffer, "EPHandle": EPHandle},
    }
    vars(module).update(contents[generation])
    if generation == "V2":
        vars(module).update(Buffer=Buffer, topk_idx_t=torch.int64)  # V2 still carries V1
    patch.setitem(sys.modules, "deep_ep", module)
    patch.setattr("lightning_moe.dispatch.deep_ep.dispatcher._has_cuda", lambda: True)
    return module
