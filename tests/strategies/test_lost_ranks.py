"""Which errors are those of a lost connection; tests/strategies/test_launching.py loses processes."""

import pytest
import torch.distributed as dist

from lightning_moe.strategies.lost_ranks import is_lost_connection, report_lost_ranks


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [::1]:1: Connection reset by peer."), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("the watchdog got stuck"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_lost_connection_is_told_from_other_errors(error: BaseException, lost: bool) -> None:
    assert is_lost_connection(error) is lost


def test_one_process_reports_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    report_lost_ranks(RuntimeError("gloo"))
    assert capfd.readouterr().err == ""
