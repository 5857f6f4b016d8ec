"""The systems that ``gpu_step.py`` compares ours with, put together from their own public pieces.

Both hold parameters, gradients and moments in float32 and compute in bfloat16, with the fastest settings found.
"""

import os
import types
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gpu_shapes import ADAMW, PRECISION, Options, Shape, System, in_turn, one_by_one
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel


def torchtitan(shape: Shape, options: Options) -> System:
    """TorchTitan 0.2.2: its model, FSDP2 with one rank, blocks and loss compiled, bias updates by its optimizer hook.

    Its defaults take FlexAttention and reshard; cuDNN attention and no resharding were found faster.
    """
    _refuse_mtp(shape)
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
    from torchtitan.config import JobConfig
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model as TitanModel
    from torchtitan.models.deepseek_v3.infra.parallelize import _op_sac_save_list
    from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp

    job = JobConfig()
    job.optimizer.name, job.optimizer.lr, job.optimizer.eps = "AdamW", ADAMW["lr"], ADAMW["eps"]
    job.optimizer.implementation = "fused" if options.device.type == "cuda" else "for-loop"
    job.activation_checkpoint.mode = "selective" if options.checkpointing else "none"
    job.activation_checkpoint.selective_ac_option = "op"
    job.compile.enable = options.compile
    with torch.device("meta"):
        model = TitanModel(_titan_arguments(shape, options))
    if options.checkpointing:
        apply_ac(
            model,
            job.activation_checkpoint,
            model_compile_enabled=options.compile,
            op_sac_save_list=_op_sac_save_list,
        )
    if options.compile:
        apply_compile(model, job.compile, ep_enabled=False)
    apply_fsdp(
        model,
        _mesh_of_one(options.device),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy="never",
    )
    model.to_empty(device=options.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    one_device = types.SimpleNamespace(ep_enabled=False, pp_enabled=False, get_optional_mesh=lambda *_: None)
    optimizers = build_optimizers_with_moe_load_balancing([model], job.optimizer, one_device)
    loss_function = build_cross_entropy_loss(job)
    parameters = list(model.parameters())

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        optimizers.zero_grad()
        logits = model(input_ids)
        loss = loss_function(logits, labels) / labels.numel()
        del logits
        loss.backward()
        if options.clip:
            clip_grad_norm_(parameters, options.clip, foreach=True)
        optimizers.step()
        return loss.detach()

    settings = {
        "precision": PRECISION,
        "attention": "SDPA, cuDNN first",
        "optimizer": f"{job.optimizer.implementation} AdamW",
        "router": f"{shape.config.scoring_func}, bias updated",
        "reshard_after_forward": "never",
    }
    return System(one_by_one(step), sum(p.numel() for p in parameters), settings)


def _titan_arguments(shape: Shape, options: Options) -> Any:
    from torchtitan.models.deepseek_v3 import deepseekv3_args

    config = shape.config
    known = deepseekv3_args["671B" if config.q_lora_rank else "16B"]
    grouped = config.n_group > 1
    moe = replace(
        known.moe_args,
        num_experts=config.n_routed_experts,
        num_shared_experts=config.n_shared_experts,
        top_k=config.num_experts_per_tok,
        num_expert_groups=config.n_group if grouped else None,
        num_limited_groups=config.topk_group if grouped else None,
        score_func=config.scoring_func,
        route_norm=config.norm_topk_prob,
        route_scale=config.routed_scaling_factor,
        _debug_force_load_balance=options.forced_balance,
    )
    arguments = replace(
        known,
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        inter_dim=config.intermediate_size,
        moe_inter_dim=config.moe_intermediate_size,
        n_layers=config.num_hidden_layers,
        n_dense_layers=config.first_k_dense_replace,
        n_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank or 0,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        max_seq_len=shape.sequence,
        attn_type="sdpa",
        attn_mask_type="causal",
        moe_args=moe,
    )
    arguments.moe_impl = "standard"  # set from its job configuration otherwise
    return arguments


def transformers(shape: Shape, options: Options) -> System:
    """The DeepSeek-V3 of transformers, tuned: FSDP2 with one rank, cuDNN attention, grouped experts, layers compiled.

    It routes by sigmoid and has no bias update.
    """
    _refuse_mtp(shape)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import DeepseekV3ForCausalLM

    on_cuda = options.device.type == "cuda"
    torch._dynamo.config.capture_scalar_outputs = True
    if options.forced_balance:
        _balance_transformers()
    with torch.device(options.device):
        model = DeepseekV3ForCausalLM._from_config(
            _transformers_config(shape),
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm" if on_cuda else "eager",
        )
    model.train()
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.model.layers
    if options.compile:
        for index in range(len(layers)):
            layers[index] = torch.compile(layers[index])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = _mesh_of_one(options.device)
    for layer in [*layers, model.model.embed_tokens]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    loss_function = torch.compile(_cross_entropy) if options.compile else _cross_entropy
    backends = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with sdpa_kernel(backends, set_priority=True):
            logits = model(input_ids=input_ids, use_cache=False).logits
            loss = loss_function(logits, labels) / labels.numel()
            del logits
            loss.backward()
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip, foreach=True)
        optimizer.step()
        return loss.detach()

    settings = {
        "precision": PRECISION,
        "attention": "SDPA, cuDNN first",
        "optimizer": "fused AdamW",
        "router": "sigmoid, bias frozen",
        "experts": "grouped_mm" if on_cuda else "eager",
    }
    return System(one_by_one(step), total, settings)


def _transformers_config(shape: Shape) -> Any:
    from transformers import DeepseekV3Config

    config = shape.config
    same = (
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads "
        "n_shared_experts n_routed_experts num_experts_per_tok n_group topk_group routed_scaling_factor norm_topk_prob "
        "first_k_dense_replace q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "max_position_embeddings initializer_range rms_norm_eps"
    )
    return DeepseekV3Config(
        **{name: getattr(config, name) for name in same.split()},
        num_key_value_heads=config.num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        num_mtp_layers=0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def _balance_transformers() -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.view(-1, self.hidden_dim)
        logits = nn.functional.linear(rows.float(), self.weight.float())
        indices = in_turn(logits.new_empty(len(rows), self.top_k), self.num_experts)
        return logits, logits.sigmoid().gather(1, indices) * self.routed_scaling_factor, indices

    modeling.DeepseekV3TopkRouter.forward = forward  # type: ignore[method-assign]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def _refuse_mtp(shape: Shape) -> None:
    if shape.config.num_nextn_predict_layers:
        raise ValueError("it does not train multi-token prediction")


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    """A process group of this process alone; the rivals put their precision and sharding on a mesh."""
    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
