"""Run by `support.run_program`: prefills of a model with EAGLE3's captured states on several ranks, scattered and not.

`RANKS FAULT...`: number of processes, and names of `FAULTS` or "none". Prints what each rank found for each fault, in a
row for each prefill: the rows of which it computed q_a and kv_a, what differs in a bit, and which routers read a number
that is not finite. The layers are SGLang's, with weights at random. Attention's padding rows hold NaN.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
from sglang.benchmark import one_batch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import aux_hidden_states
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.models import deepseek_v2
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args
from sglang.srt.utils import numa_utils
from support.tiny_servers import tiny_launch

from kimi_w4a8_eagle3.sglang_plugin.prefill import input_scattered
from kimi_w4a8_laptop import tiny

# Heads and channels that 2, 3 and 8 ranks share.
SHAPE = {
    "num_attention_heads": 24, "num_key_value_heads": 24, "intermediate_size": 192, "moe_intermediate_size": 48,
    "hidden_size": 96, "num_hidden_layers": 4, "vocab_size": 768, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
WHOLE = ((17,), (1,), (25, 8), (9, 40, 16))  # lengths of the prompts of a prefill: one row more than a multiple of 8
CHUNKS = ((24, 17), (9, 16))  # lengths of two chunks


def wrong_share() -> None:
    """A rank takes its neighbour's part of the residual."""
    group = input_scattered.get_tp_group

    def neighbour() -> Any:
        mine = group()
        rank = (mine.rank_in_group + 1) % mine.world_size
        return SimpleNamespace(
            world_size=mine.world_size,
            rank_in_group=rank,
            reduce_scatter_tensor=mine.reduce_scatter_tensor,
            all_gather_into_tensor=mine.all_gather_into_tensor,
        )

    input_scattered.get_tp_group = neighbour


def no_gather() -> None:
    """The captured states stay each rank's share."""
    packer = aux_hidden_states.AuxHiddenStatePacker
    packer.finalize = inspect.unwrap(packer.finalize)


def embedding_twice() -> None:
    """Every rank's embeddings count in the sum."""
    vars(input_scattered)["torch"] = SimpleNamespace(zeros_like=lambda tensor: tensor, empty_like=torch.empty_like)


def residual_first() -> None:
    """SGLang's own order: the residual is added to the partial sum of one rank."""
    name = input_scattered._SUM
    owner, _, attribute = name.rpartition(".")
    original = inspect.unwrap(pkgutil.resolve_name(name))
    place = pkgutil.resolve_name(owner)
    setattr(place, attribute, staticmethod(original) if isinstance(place, type) else original)


def padding_kept() -> None:
    """The rows that attention did not compute stay as they are in memory."""
    input_scattered.clear_padding = lambda hidden_states: None


FAULTS = {one.__name__: one for one in (wrong_share, no_gather, embedding_twice, residual_first, padding_kept)}


def sum_in_order() -> None:
    """Sum over the ranks in their order: gloo and RCCL choose it by size and place, which changes the rounding."""

    def parts(group: GroupCoordinator, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty((group.world_size, *tensor.shape))
        torch.distributed.all_gather_into_tensor(found.flatten(), tensor.flatten(), group=group.device_group)
        return found

    def all_reduce(group: GroupCoordinator, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if group.world_size == 1 else parts(group, tensor).sum(0)

    def reduce_scatter(group: GroupCoordinator, output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(parts(group, tensor).sum(0).chunk(group.world_size)[group.rank_in_group])

    GroupCoordinator.all_reduce, GroupCoordinator.reduce_scatter_tensor = all_reduce, reduce_scatter


def folder() -> Path:
    """Write the configuration of the model."""
    config = json.loads((tiny.target_bf16_path() / "config.json").read_text())
    config["text_config"] |= SHAPE
    place = Path(mkdtemp())
    (place / "config.json").write_text(json.dumps(config))
    return place


def runner_of(rank: int, ranks: int, model: Path, ports: PortArgs) -> Any:
    """Return a ModelRunner with weights at random; each rank has others, as it has other rows of real ones."""
    settings = (
        f"tp-size={ranks}",
        "enable-attn-tp-input-scattered=true",
        "load-format=dummy",
        "mm-enable-dp-encoder=true",
    )
    words = list(tiny_launch(False, tuple(settings)).command.arguments)
    words = words[words.index("--model-path") :] if "--model-path" in words else words
    args = prepare_server_args([*words, "--model-path", str(model), "--skip-tokenizer-init"])
    more = {}
    if hasattr(one_batch, "SpawnRanks"):  # 0.5.23
        more["ranks"] = one_batch.SpawnRanks(world_rank=rank, gpu_id=rank)
    publish(args, role="scheduler", **more)
    one_batch.get_tokenizer = lambda *_, **__: None
    runner, _ = one_batch.load_model(args, ports, rank, rank)
    torch.manual_seed(rank)
    for name, parameter in runner.torch_runner.model.named_parameters():
        shared = "layernorm" in name or "_a_proj" in name or ".gate." in name  # the same on every rank
        torch.manual_seed(len(name) if shared else 100 * rank + len(name))
        if parameter.is_floating_point() and parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return runner.torch_runner


def prefill(runner: Any, reqs: list[Req], scattered: bool) -> dict[str, torch.Tensor]:
    """Run one prefill, and return all captured states and the logits."""
    deepseek_v2.get_attn_tp_context().allow_input_scattered = scattered
    found: dict[str, torch.Tensor] = {}

    class Capturing:
        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        def forward(self, forward_batch: ForwardBatch) -> Any:
            forward_batch.capture_hidden_mode = CaptureHiddenMode.FULL
            forward_batch.sampling_info.kimi_penalties = None  # which a TpModelWorker attaches
            output = runner.forward(forward_batch)
            found.update(states=output.logits_output.hidden_states, logits=output.logits_output.next_token_logits)
            return output

    one_batch.extend(reqs, Capturing())
    return found


def run(runner: Any, parts: list[tuple[int, ...]], scattered: bool) -> list[dict[str, torch.Tensor]]:
    """Prefill prompts in parts, each a chunk of every prompt; the second reads the first from the KV pool."""
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    torch.manual_seed(7)
    lengths = [sum(chunks) for chunks in zip(*parts, strict=True)]
    reqs = [
        Req(
            rid=str(number),
            origin_input_text="",
            origin_input_ids=array("q", torch.randint(700, (length,)).tolist()),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        for number, length in enumerate(lengths)
    ]
    found, done = [], [0] * len(reqs)
    for chunks in parts:
        for number, req in enumerate(reqs):
            req.full_untruncated_fill_ids = req.origin_input_ids[: done[number] + chunks[number]]
            req.logprob_start_len = -1
            if hasattr(req, "set_extend_range"):  # 0.5.20
                if done[number]:
                    table = runner.req_to_token_pool.req_to_token
                    req.prefix_indices = table[req.kv.req_pool_idx, : done[number]].to(req.prefix_indices.dtype)
                req.set_extend_range(done[number], done[number] + chunks[number])
            else:
                req.prefix_len, req.extend_end = done[number], done[number] + chunks[number]
            done[number] += chunks[number]
        found.append(prefill(runner, reqs, scattered))
    return found


def of_rank(rank: int, ranks: int, fault: str, model: Path, ports: PortArgs) -> list[dict[str, Any]]:
    """Compare the prefills of this rank with and without shares."""
    runner = runner_of(rank, ranks, model, ports)
    sum_in_order()
    target = runner.model.language_model
    layers = target.config.num_hidden_layers
    target.capture_aux_hidden_states, target.model.layers_to_capture = True, list(range(1, layers))
    rows, computed, not_finite = [0], [0], set[str]()
    runner.forward = noting(runner.forward, computed)
    projection = target.model.layers[0].self_attn.fused_qkv_a_proj_with_mqa
    projection.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    for name, module in target.named_modules():
        if name.endswith(".o_proj"):  # AITER's attention leaves padding rows unwritten
            module.register_forward_pre_hook(lambda _, given: poison(given[0], computed[0]))
        if name.endswith(".gate"):
            module.register_forward_pre_hook(
                lambda _, given, name=name: not_finite.update(() if given[0].isfinite().all() else (name,))
            )
    FAULTS.get(fault, lambda: None)()
    found = []
    prompts: list[list[tuple[int, ...]]] = [*([lengths] for lengths in WHOLE), list(CHUNKS)]
    for parts in prompts:
        whole = run(runner, parts, scattered=False)
        assert not not_finite and all(tensor.isfinite().all() for one in whole for tensor in one.values())
        try:
            shares = run(runner, parts, scattered=True)
            differs = {name for pair in zip(whole, shares, strict=True) for name in differing(*pair, layers)}
        except IndexError as error:
            differs = {str(error)}
        found.append({"rows": rows[-1], "differs": sorted(differs), "not finite": sorted(not_finite)})
        if differs or not_finite:
            break
    return found


def poison(attended: torch.Tensor, rows: int) -> None:
    attended[rows:] = float("nan")


def noting(forward: Callable[..., Any], computed: list[int]) -> Callable[..., Any]:
    """Return `forward` of a runner, which notes the rows without padding before a pass."""

    def noted(forward_batch: ForwardBatch) -> Any:
        computed[0] = sum(forward_batch.extend_seq_lens_cpu)
        return forward(forward_batch)

    return noted


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], layers: int) -> Iterator[str]:
    """Yield the names of what differs in any bit."""
    if one["states"].shape != other["states"].shape:
        yield "shape of the captured states"
        return
    states = zip(*(found["states"].chunk(layers - 1, dim=-1) for found in (one, other)), strict=True)
    yield from (f"input of layer {number}" for number, pair in enumerate(states, 1) if not torch.equal(*pair))
    if not torch.equal(one["logits"], other["logits"]):
        yield "logits"


def answers(ranks: int, fault: str, model: Path, ports: PortArgs) -> list[list[dict[str, Any]]]:
    """Return what each rank's process found; a rank that ends without an answer has none."""
    readers = []
    for rank in range(ranks):
        reader, writer = os.pipe()
        if not os.fork():
            try:
                os.write(writer, json.dumps(of_rank(rank, ranks, fault, model, ports)).encode())
            except Exception:
                traceback.print_exc()
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    said = []
    for reader in readers:
        with os.fdopen(reader) as file:
            text = file.read()
        os.wait()
        said.append(json.loads(text) if text else [])
    return said


def main() -> None:
    ranks, *faults = sys.argv[1:]
    model = folder()
    numa_utils.init_threads_binding = lambda *_, **__: "0"  # it wants a core for each rank
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu"])
    print(json.dumps({fault: answers(int(ranks), fault, model, PortArgs.init_new(args)) for fault in faults}))


if __name__ == "__main__":
    main()
