"""Multi-token-prediction layers of checkpoints that ship them, read into an `MTPHead`.

`transformers` drops these tensors when it loads a model, so they are read from the safetensors files. Which layout a
checkpoint has is told by its tensors' names, N being the config's num_hidden_layers (names and the order of the
concatenation as in vLLM's deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py and qwen3_next_mtp.py):

    deepseek     model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm} and the block beside them; GLM-4.5 likewise
    mimo         model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}
                 ([hidden; embedding], where the others have [embedding; hidden])
    qwen3-next   mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, the block in mtp.layers.0

Only the first layer is read; a checkpoint with several drafts further with that one. Copies of the embedding and the LM
head that a layer brings along are left out: they are the target's.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from longtail.partial_rollout.engines.native.mtp_head import MTPHead


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    name: str
    prefix: str
    """Of all its tensors; {n} stands for num_hidden_layers."""
    enorm: str
    hnorm: str
    proj: str
    norm: str
    block: str = ""
    """Prefix of the block's tensors, behind `prefix`."""
    hidden_first: bool = False
    """The projection reads [hidden; embedding]."""
    copies: tuple[str, ...] = ()
    """Beginnings of what is the target's, too."""


LAYOUTS = (
    Layout(
        "deepseek",
        "model.layers.{n}.",
        "enorm",
        "hnorm",
        "eh_proj",
        "shared_head.norm",
        copies=("embed_tokens.", "shared_head.head."),
    ),
    Layout(
        "mimo",
        "model.mtp_layers.0.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
    ),
    Layout(
        "qwen3-next", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block="layers.0.",
        copies=("embed_tokens.", "lm_head."),
    ),
)  # fmt: skip


def load_shipped(directory: str | Path) -> MTPHead:
    """The head that the checkpoint in this directory ships. ValueError if it ships none, or one that does not fit the
    model's own layers, or in a quantised format."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(directory)).get_text_config()
    index = _index(Path(directory))
    layout = find_layout(index, config.num_hidden_layers)
    if layout is None:
        raise ValueError(
            f"mtp: {directory} ships no multi-token-prediction layer in a known layout "
            f"({', '.join(one.name for one in LAYOUTS)}); train one: longtail spec train"
        )
    prefix = layout.prefix.format(n=config.num_hidden_layers)
    tensors = _read(Path(directory), {name: file for name, file in index.items() if name.startswith(prefix)})
    head = MTPHead(config)
    _fill(head, layout, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, str(directory))
    head.record = {"shipped": str(directory), "layout": layout.name}
    return head


def find_layout(names: Any, num_layers: int) -> Layout | None:
    """The layout whose projection is among these tensors' names."""
    for layout in LAYOUTS:
        if f"{layout.prefix.format(n=num_layers)}{layout.proj}.weight" in names:
            return layout
    return None


@torch.no_grad()
def _fill(head: MTPHead, layout: Layout, tensors: dict[str, torch.Tensor], source: str) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ValueError(f"mtp: {source}: {name} is {tensor.dtype}; convert the checkpoint to bfloat16 first")
    size = head.eh_proj.out_features
    proj = tensors.pop(f"{layout.proj}.weight", None)
    if proj is None or proj.shape != (size, 2 * size):
        shape = None if proj is None else tuple(proj.shape)
        raise ValueError(f"mtp: {source}: {layout.proj}.weight has shape {shape}, the model needs {(size, 2 * size)}")
    if layout.hidden_first:
        proj = torch.cat([proj[:, size:], proj[:, :size]], dim=1)
    head.eh_proj.weight.copy_(proj)
    for module, name in ((head.enorm, layout.enorm), (head.hnorm, layout.hnorm)):
        weight = tensors.pop(f"{name}.weight", None)
        if weight is None or weight.shape != (size,):
            raise ValueError(f"mtp: {source}: {name}.weight is missing, or not of the model's hidden size {size}")
        module.weight.copy_(weight)  # type: ignore[operator]
    block = {"model.norm.weight": tensors.pop(f"{layout.norm}.weight", None)}
    if block["model.norm.weight"] is None:
        raise ValueError(f"mtp: {source}: {layout.norm}.weight is missing")
    for name, tensor in tensors.items():
        if not name.startswith(layout.copies or ("\0",)) and name.startswith(layout.block):
            block[f"model.layers.0.{name.removeprefix(layout.block)}"] = tensor
    _load_block(head, block, source)


def _load_block(head: MTPHead, state: dict[str, Any], source: str) -> None:
    """Through the library's own loading, which knows how a checkpoint's experts become the model's."""
    for name, p in (
        ("model.embed_tokens.weight", head.block.get_input_embeddings().weight),
        ("lm_head.weight", head.block.get_output_embeddings().weight),
    ):
        state[name] = p.detach().clone()
    loaded, report = type(head.block).from_pretrained(
        None, config=head.block.config, state_dict=state, output_loading_info=True, dtype=torch.float32
    )
    problems = [*report["missing_keys"], *report["unexpected_keys"], *(k[0] for k in report["mismatched_keys"])]
    if problems:
        raise ValueError(
            f"mtp: {source}: its multi-token-prediction layer does not fit the model's own layers: "
            f"{', '.join(map(str, sorted(problems)[:3]))}"
        )
    head.block.load_state_dict(loaded.state_dict())


def _index(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    from safetensors import safe_open

    listed = directory / "model.safetensors.index.json"
    if listed.is_file():
        names: dict[str, str] = json.loads(listed.read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ValueError(f"mtp: {directory} holds no safetensors files")
    return found


def _read(directory: Path, index: dict[str, Path]) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors = {}
    for path in sorted(set(index.values())):
        if not path.is_file():
            raise ValueError(f"mtp: {directory}: {path.name} is missing; it holds the multi-token-prediction layer")
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name, at in index.items() if at == path})
    return tensors
