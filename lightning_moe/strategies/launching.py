"""How many processes a launcher has started, and whether that is what the user asked for."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment


@dataclass(frozen=True)
class Launch:
    """The processes that torchrun or SLURM has started.

    Args:
        launcher: What to call it.
        devices: Processes on each node; each has one device.
        num_nodes: Nodes.
        devices_variable: Where ``devices`` was read, as ``NAME=value``.
        nodes_variable: Where ``num_nodes`` was read.
        devices_flag: The launcher's own flag for ``devices``.
        nodes_flag: The launcher's own flag for ``num_nodes``.
    """

    launcher: str
    devices: int
    num_nodes: int
    devices_variable: str
    nodes_variable: str
    devices_flag: str
    nodes_flag: str


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Reads what torchrun or SLURM's ``srun`` says about the processes, in the order in which Lightning looks.

    Args:
        environment: Environment variables.

    Returns:
        The processes, or ``None`` where neither of them has started this one.

    Raises:
        ValueError: The variables are no numbers, or nodes differ in their number of processes.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        devices, world_size = (_number(environment, name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        nodes = _number(environment, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environment else world_size // devices
        total, flags = "WORLD_SIZE", ("torchrun", "--nproc-per-node", "--nnodes")
        devices_variable, nodes_variable = f"LOCAL_WORLD_SIZE={devices}", f"WORLD_SIZE={world_size}"
    elif "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        world_size = _number(environment, "SLURM_NTASKS")
        nodes = _number(environment, "SLURM_NNODES") if "SLURM_NNODES" in environment else 1
        if "SLURM_NTASKS_PER_NODE" in environment:
            devices = _number(environment, "SLURM_NTASKS_PER_NODE")
            devices_variable = f"SLURM_NTASKS_PER_NODE={devices}"
        elif world_size == 1:
            devices, devices_variable = 1, "SLURM_NTASKS=1"
        else:
            raise ValueError(
                f"SLURM_NTASKS={world_size} does not say how many processes a node has.\n"
                f"Give SLURM --ntasks-per-node={max(1, world_size // nodes)} instead of --ntasks."
            )
        total, flags = "SLURM_NTASKS", ("SLURM", "--ntasks-per-node", "--nodes")
        nodes_variable = f"SLURM_NNODES={nodes}"
    else:
        return None
    if devices * nodes != world_size:
        raise ValueError(
            f"{flags[0]} started {total}={world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, but "
            f"{devices_variable}: each node must have the same number.\n"
            f"Start them with the same {flags[1]} on all nodes."
        )
    return Launch(flags[0], devices, nodes, devices_variable, nodes_variable, *flags[1:])


def choose_devices(devices: Any, num_nodes: int, environment: Mapping[str, str] = os.environ) -> tuple[Any, int]:
    """Fills in the trainer's ``devices`` and ``num_nodes`` from torchrun or SLURM, or checks what is given.

    Args:
        devices: As given to the trainer; ``"auto"`` and -1 mean what the launcher says.
        num_nodes: As given to the trainer; 1, its default, means what the launcher says.
        environment: Environment variables.

    Returns:
        Devices and nodes for the trainer.

    Raises:
        ValueError: What is given is no number of devices, or not what was started.
    """
    if not _can_be_devices(devices):
        raise ValueError(
            f"trainer.devices is {devices}, but must be auto, -1 for all there are, a number of at least 1 or a list "
            "of indices."
        )
    launch = read_launch(environment)
    if launch is None:
        return devices, num_nodes
    given = _count(devices)
    _check(launch, launch.devices if given is None else given, launch.num_nodes if num_nodes == 1 else num_nodes)
    return (launch.devices if given is None else devices), launch.num_nodes


def check_launch(devices: int, num_nodes: int, cluster: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Checks a trainer's devices and nodes against what torchrun or SLURM has started.

    Args:
        devices: The trainer's devices on this node.
        num_nodes: The trainer's nodes.
        cluster: The trainer's cluster environment; one that is not torchrun's or SLURM's is not checked.
        environment: Environment variables.

    Raises:
        ValueError: They differ.
    """
    launch = read_launch(environment) if isinstance(cluster, TorchElasticEnvironment | SLURMEnvironment) else None
    if launch is not None:
        _check(launch, devices, num_nodes)


def brings_cluster_environment(trainer_config: Mapping[str, Any]) -> bool:
    """Whether a trainer is given a cluster environment of the user's own, which then knows the processes."""
    plugins = trainer_config.get("plugins") or []
    plugins = plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
    own = [*plugins, getattr(trainer_config.get("strategy"), "cluster_environment", None)]
    return any(isinstance(plugin, ClusterEnvironment) for plugin in own)


def is_requeued(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM has put this job back into the queue before, so that it goes on and does not start."""
    return environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _check(launch: Launch, devices: int, num_nodes: int) -> None:
    if devices != launch.devices:
        raise ValueError(
            f"trainer.devices is {devices}, but {launch.launcher} started {_processes(launch.devices)} on each node "
            f"({launch.devices_variable}).\n"
            f"Set trainer.devices to {launch.devices}, or give {launch.launcher} {launch.devices_flag}={devices}."
        )
    if num_nodes != launch.num_nodes:
        raise ValueError(
            f"trainer.num_nodes is {num_nodes}, but {launch.launcher} started {_processes(launch.devices)} on each of "
            f"{launch.num_nodes} nodes ({launch.nodes_variable}).\n"
            f"Set trainer.num_nodes to {launch.num_nodes}, or give {launch.launcher} {launch.nodes_flag}={num_nodes}."
        )


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _count(devices: Any) -> int | None:
    """How many devices are asked for; ``None`` for as many as there are."""
    if isinstance(devices, str):
        parts = [part for part in devices.split(",") if part.strip()]
        if "," in devices:
            return len(parts)
        devices = int(devices) if devices.strip().lstrip("-").isdigit() else None
    if isinstance(devices, Sequence):
        return len(devices)
    return None if devices is None or devices < 0 else int(devices)


def _can_be_devices(devices: Any) -> bool:
    if isinstance(devices, str) and "," in devices:
        devices = [part.strip() for part in devices.split(",") if part.strip()]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return len(devices) > 0 and all(str(index).isdigit() for index in devices)
    return devices in (None, "auto") or str(devices).strip() == "-1" or (_count(devices) or 0) > 0


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"The environment variable {name} is {value!r}, but it must be a number of at least 1.")
    return int(value)
