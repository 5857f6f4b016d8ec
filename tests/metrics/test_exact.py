import torch

from lightning_moe.metrics import ExpertLoad, MTPAccuracy, TokenMean


def test_states_of_processes_are_summed() -> None:
    # As in a reduction over two processes, of which the second has three times the tokens of the first
    means, loads = (TokenMean(), TokenMean()), (ExpertLoad(1, 2), ExpertLoad(1, 2))
    accuracies = (MTPAccuracy(1), MTPAccuracy(1))
    means[0].update(4.0, 1)
    means[1].update(3.0, 3)
    loads[0].update(torch.tensor([[1, 0]]))
    loads[1].update(torch.tensor([[0, 3]]))
    accuracies[0].update(torch.tensor([0]), torch.tensor([1]), torch.tensor([1]))
    accuracies[1].update(torch.tensor([1]), torch.tensor([3]), torch.tensor([2]))
    means[0].merge_state(means[1])
    loads[0].merge_state(loads[1])
    accuracies[0].merge_state(accuracies[1])
    assert means[0].compute().item() == 1.75
    assert loads[0].compute()["max_violation"].item() == 0.5
    assert {name: value.item() for name, value in accuracies[0].compute().items()} == {
        "accuracy": 0.25,
        "acceptance": 0.75,
    }
