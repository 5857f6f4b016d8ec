"""Our system in ``gpu_step.py``: a whole step of the training module, without a Trainer and through it."""

import tempfile
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gpu_shapes import ADAMW, PRECISION, Batch, Options, Shape, System, in_turn, one_by_one
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe.callbacks.throughput import MoEThroughput
from lightning_moe.models.deepseek_v3 import DeepSeekV3
from lightning_moe.moe.layer import MoELayer
from lightning_moe.moe.router import Router, RoutingPlan
from lightning_moe.optim.adamw import AdamW
from lightning_moe.precision.casting import keep_gradients_lowered
from lightning_moe.precision.plugin import MoEPrecision
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy

OURS = "lightning-moe"
MTP_WEIGHT = 0.3
LOG_EVERY_N_STEPS = 10


def without_trainer(shape: Shape, options: Options, plugin: MoEPrecision | None = None) -> System:
    """What the strategy assembles on one device, and all that the module does in a step.

    Args:
        shape: The step.
        options: Of the run.
        plugin: What the strategy converts the model by; ``None`` for bfloat16.
    """
    module, strategy = _module(shape, options), _strategy(options)
    strategy.parallel_devices = [options.device]
    strategy.precision_plugin = plugin
    strategy.connect(module)
    # As much of a Trainer as a step asks for.
    trainer: Any = types.SimpleNamespace(
        strategy=strategy,
        precision_plugin=plugin,
        datamodule=types.SimpleNamespace(micro_batch_size=shape.batch, sequence_length=shape.sequence),
        world_size=1,
        accumulate_grad_batches=1,
        distributed_sampler_kwargs=None,
        global_step=1,
        log_every_n_steps=2**62,
    )
    module._trainer = trainer
    module.configure_model()
    if options.forced_balance:
        force_balance(module)
    optimizer = module.configure_optimizers()
    if getattr(optimizer, "takes_gradient_factor", False):
        keep_gradients_lowered(module)
    module.train()

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = module.training_step({"input_ids": input_ids, "labels": labels}, 0)
        loss.backward()
        mean = module._step_sums.sums["loss"] / labels.numel()
        module.configure_gradient_clipping(optimizer, options.clip or None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        module.on_train_batch_end(None, None, 0)
        return mean

    def name_parts() -> None:
        _name_parts(module)
        _named(optimizer, "step", "optimizer")

    modules = tuple(module.built_model.modules())
    return System(one_by_one(step), _size(module), _settings(module, options), name_parts, modules)


def with_bf16_moments(shape: Shape, options: Options) -> System:
    """As :func:`without_trainer`, with the optimizer's moments in bfloat16, as in the report."""
    system = without_trainer(shape, replace(options, optimizer={**options.optimizer, "moments": "bfloat16"}))
    return replace(
        system, settings={**system.settings, "precision": PRECISION.replace(" and moments", ", bf16 moments")}
    )


def through_trainer(shape: Shape, options: Options) -> System:
    """The same step in ``Trainer.fit``, with logging and metrics every ten steps."""
    module = _module(shape, options)

    def train(batches: Iterable[Batch], after_step: Callable[[Tensor], None]) -> None:
        rows = [{"input_ids": input_ids, "labels": labels} for input_ids, labels in batches]
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                accelerator="gpu" if options.device.type == "cuda" else "cpu",
                devices=1,
                strategy=_strategy(options),
                max_steps=len(rows),
                gradient_clip_val=options.clip or None,
                log_every_n_steps=LOG_EVERY_N_STEPS,
                logger=CSVLogger(folder),
                callbacks=[AfterStep(after_step, shape.tokens, options.forced_balance), MoEThroughput()],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
            )
            trainer.fit(module, DataLoader(rows, batch_size=None))  # type: ignore[arg-type]

    parameters, _ = shape.count()
    return System(train, parameters, {**_settings(module, options), "log_every_n_steps": LOG_EVERY_N_STEPS})


class AfterStep(Callback):
    """Calls a function with the mean loss of this process after each step.

    Args:
        function: What is called.
        tokens: Tokens of a step of this process.
        forced_balance: Whether tokens go to the experts in turn, whatever the router says.
    """

    def __init__(self, function: Callable[[Tensor], None], tokens: int, forced_balance: bool = False) -> None:
        self.function = function
        self.tokens = tokens
        self.forced_balance = forced_balance

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.forced_balance:
            assert isinstance(pl_module, DeepSeekV3)
            force_balance(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.function(outputs["loss"].detach() / self.tokens)


def _module(shape: Shape, options: Options) -> DeepSeekV3:
    arguments = {**ADAMW, **options.optimizer}
    module = DeepSeekV3(shape.config, lambda parameters: AdamW(parameters, **arguments), mtp_loss_weight=MTP_WEIGHT)
    return module.to(options.device)  # it has no parameters yet, but says which attention it takes there


def _strategy(options: Options) -> ExpertParallelStrategy:
    arguments: dict[str, Any] = {
        "compile": options.compile,
        "compute_dtype": "bfloat16",
        "activation_checkpointing": "selective" if options.checkpointing else "none",
    }
    return ExpertParallelStrategy(**{**arguments, **options.strategy})


def _settings(module: DeepSeekV3, options: Options) -> dict[str, Any]:
    return {
        "precision": PRECISION,
        "attention": module.attention_backend(),
        "optimizer": "AdamW",
        "router": f"{module.config.scoring_func}, bias updated",
        "strategy_arguments": options.strategy,
        "optimizer_arguments": options.optimizer,
    }


def _size(module: DeepSeekV3) -> int:
    return sum(p.numel() for p in module.parameters())


def force_balance(module: DeepSeekV3) -> None:
    """Sends tokens to the experts in turn, with the router's own scores as weights."""
    for _, layer in module.built_model.moe_layers():
        layer.router.forward = _balanced(layer.router)  # type: ignore[method-assign]


def _balanced(router: Router) -> Callable[..., RoutingPlan]:
    route = router.forward

    def forward(x_TD: Tensor, valid_T: Tensor | None = None) -> RoutingPlan:
        plan = route(x_TD, valid_T)
        indices_TK = in_turn(plan.indices_TK, router.n_routed_experts)
        weights_TK = plan.scores_TE.gather(1, indices_TK) * router.routed_scaling_factor
        if not plan.all_valid:
            chosen_TK = plan.indices_TK >= 0
            indices_TK, weights_TK = indices_TK.where(chosen_TK, -1), weights_TK.where(chosen_TK, 0.0)
        return plan._replace(indices_TK=indices_TK, weights_TK=weights_TK)

    return forward


def _name_parts(module: DeepSeekV3) -> None:
    """Names the parts of the model where they are entered, which is outside of what is compiled."""
    model: Any = module.built_model
    _named(model.embed_tokens, "forward", "embedding")
    _named(model.lm_head, "cross_entropies", "head")
    _named(module, "configure_gradient_clipping", "gradient norm")
    for depth in model.mtp_layers.values():
        _named(depth.eh_proj, "forward", "multi-token projection")
    named: set[int] = set()
    for _, block in model.blocks():
        _named(block, "attend", "attention")
        mlp: Any = block.mlp
        if not isinstance(mlp, MoELayer):
            _named(mlp, "forward", "dense feed-forward")
            continue
        _named(mlp.router, "forward", "router")
        _named(mlp.experts, "forward", "experts")
        if mlp.shared_experts is not None:
            _named(mlp.shared_experts, "forward", "shared expert")
        if id(mlp.dispatcher) not in named:  # layers may share one
            _named(mlp.dispatcher, "dispatch", "permute")
            _named(mlp.dispatcher, "combine", "permute")
            named.add(id(mlp.dispatcher))


def _named(owner: Any, method: str, part: str) -> None:
    function = getattr(owner, method)

    def inside_range(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"part: {part}"):
            return function(*args, **kwargs)

    setattr(owner, method, inside_range)
