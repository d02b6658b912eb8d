"""A multi-token-prediction head in DeepSeek-V3's form (DeepSeek-AI 2024, section 2.2): one block behind the target.

    row p:  [enorm(embedding of token p) ; hnorm(hidden state p - 1)] -> eh_proj -> one block -> norm -> LM head
            -> a guess at token p + 1

(In the paper's count this is row p - 1. Row 0 reads zeros for a hidden state.) The hidden state is what the target's LM
head reads: after its final norm. That is what SGLang and vLLM feed to shipped heads and what `transformers` returns, so
that the trainer and the engine see the same numbers. To draft further, the head's own output, after its own norm, takes
the place of the hidden state (as in SGLang): it is what the LM head reads, too.

Embedding and LM head are the target's and are not here: after an update of its weights the head uses the new ones.
The block is a one-layer model of the target's own class, so whatever target `transformers` has can have a head.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from longtail.partial_rollout.engines.native.decoder import Decoder

FORMAT = 1
IDENTITY = ("model_type", "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
"""Fields of the target's config that a head must agree with."""
SMALL = 8
"""Vocabulary of the one-layer model, whose embedding and LM head are never used."""


class MTPHead(nn.Module):
    """config: the target's. vocabulary: tokens that may be drafted, ascending; None: all (FR-Spec, Zhao et al. 2025:
    a draft's LM head over the frequent tokens costs a fraction and loses little).

    A head made like this knows nothing; `start_from` gives it the target's last layer to begin with.
    """

    def __init__(self, config: PretrainedConfig, vocabulary: torch.Tensor | None = None) -> None:
        super().__init__()
        config = config.get_text_config()
        self.target = {name: getattr(config, name, None) for name in IDENTITY}
        self.config = copy.deepcopy(config)
        self.version = 0
        self.record: dict[str, Any] = {}
        """How it was trained."""
        self.vocabulary = _checked(vocabulary, config.vocab_size)
        size = config.hidden_size
        self.block = _one_layer(config)
        self.enorm = copy.deepcopy(self._final_norm)
        self.hnorm = copy.deepcopy(self._final_norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.eval()

    @property
    def base(self) -> Any:
        """The one-layer model without its LM head."""
        return self.block.base_model

    @property
    def _final_norm(self) -> nn.Module:
        norm: nn.Module = self.base.norm
        return norm

    def join(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """hidden, embeds: [..., hidden] -> [..., hidden], what the block reads."""
        joined: torch.Tensor = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        return joined

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden: [B, T, hidden], of the position before each token, zeros before the first; embeds: [B, T, hidden],
        of the tokens; attention_mask: [B, T], 1 where there is a token (padding is on the right)
        -> [B, T, hidden], for the LM head. Causal."""
        positions = torch.arange(hidden.shape[1])[None].expand(hidden.shape[0], -1)
        out = self.base(
            inputs_embeds=self.join(hidden, embeds),
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=False,
        )
        last: torch.Tensor = out.last_hidden_state
        return last

    @torch.no_grad()
    def start_from(self, model: PreTrainedModel) -> None:
        """Begins as the target's last layer of its kind and its final norm, on the hidden state and the embedding."""
        base: Any = model.base_model
        own = self.base.layers[0]
        for layer in reversed(base.layers):
            shapes = {name: p.shape for name, p in layer.named_parameters()}
            if shapes == {name: p.shape for name, p in own.named_parameters()}:
                own.load_state_dict(layer.state_dict())
                break
        self._final_norm.load_state_dict(base.norm.state_dict())
        size = self.eh_proj.out_features
        # Both pass through, the hidden state twice as strongly, small enough for the layer to speak up beside them:
        # of the scales tried on SmolLM2 (0.3, 1, 4) the one that learns quickest.
        self.eh_proj.weight.normal_(std=0.06 * size**-0.5)
        self.eh_proj.weight[:, :size] += 0.15 * torch.eye(size)
        self.eh_proj.weight[:, size:] += 0.3 * torch.eye(size)

    def trainable(self) -> list[nn.Parameter]:
        """All but the stand-ins for embedding and LM head."""
        unused = {id(p) for m in self._stand_ins() for p in m.parameters()}
        return [p for p in self.parameters() if id(p) not in unused]

    def _stand_ins(self) -> list[nn.Module]:
        return [self.block.get_input_embeddings(), self.block.get_output_embeddings()]

    # ---- on disk

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file holds of it."""
        unused = {id(p) for m in self._stand_ins() for p in m.parameters()}
        named = dict(self.named_parameters()) | dict(self.named_buffers())
        found = {name: p.detach() for name, p in named.items() if id(p) not in unused and "rotary_emb" not in name}
        return found if self.vocabulary is None else found | {"vocabulary": self.vocabulary}

    def save(self, directory: str | Path) -> None:
        """mtp.safetensors and mtp.json, each in one rename: a kill leaves the old ones or the new ones."""
        from safetensors.torch import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.clone().contiguous() for name, p in self.tensors().items()}
        about = {
            "format": FORMAT,
            "kind": "mtp",
            "version": self.version,
            "target": self.target,
            "config": self.config.to_dict(),
            "record": self.record,
        }
        part = directory / "mtp.safetensors.part"
        # The description travels in the tensors' file, so that the two cannot disagree; mtp.json is for people.
        save_file(tensors, part, metadata={"about": json.dumps(about, default=str)})
        part.replace(directory / "mtp.safetensors")
        text = directory / "mtp.json.part"
        text.write_text(json.dumps(about, indent=1, default=str) + "\n")
        text.replace(directory / "mtp.json")

    @classmethod
    def load(cls, directory: str | Path) -> MTPHead:
        """ValueError if there is no head, or one that this code does not read."""
        from safetensors import SafetensorError, safe_open

        path = Path(directory) / "mtp.safetensors"
        if not path.is_file():
            raise ValueError(f"mtp: {directory} holds no head (no mtp.safetensors); train one: longtail spec train")
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"mtp: {path} cannot be read: {error}") from error
        if about.get("format") != FORMAT or about.get("kind") != "mtp":
            raise ValueError(f"mtp: {path} is not a head of format {FORMAT}; train it again: longtail spec train")
        from transformers import AutoConfig

        fields = dict(about["config"])
        head = cls(AutoConfig.for_model(fields.pop("model_type"), **fields), tensors.pop("vocabulary", None))
        own = head.tensors()
        own.pop("vocabulary", None)
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            differing = sorted(own.keys() ^ tensors.keys()) or [n for n in own if own[n].shape != tensors[n].shape]
            raise ValueError(f"mtp: {path} does not fit its own config: {', '.join(differing[:3])}")
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        head.version, head.record = int(about["version"]), about["record"]
        return head

    def check_target_of(self, decoder: Decoder) -> None:
        """`check_target` for an engine's decoder, which tells less."""
        size = decoder.embed(torch.zeros(1, dtype=torch.long)).shape[1]
        for name, other in (("vocab_size", decoder.spec.vocab_size), ("hidden_size", size)):
            _same(name, self.target[name], other)

    def check_target(self, config: Any) -> None:
        """ValueError that names the field in which the target with this config is not the head's."""
        config = config.get_text_config()
        for name, value in self.target.items():
            _same(name, value, getattr(config, name, None))


def _same(name: str, made_for: Any, given: Any) -> None:
    if made_for != given:
        raise ValueError(
            f"mtp: the head was made for a target with {name} {made_for}, this one has {given}; train a head for it: "
            "longtail spec train"
        )


def _checked(vocabulary: torch.Tensor | None, size: int) -> torch.Tensor | None:
    if vocabulary is None:
        return None
    vocabulary = vocabulary.long().clone()
    rising = bool((vocabulary.diff() > 0).all())
    if not len(vocabulary) or not rising or int(vocabulary[0]) < 0 or int(vocabulary[-1]) >= size:
        raise ValueError(f"vocabulary: must be ascending token ids from 0 to {size - 1}, at least one")
    return vocabulary


def one_layer_config(config: PretrainedConfig) -> PretrainedConfig:
    """The target's, with one layer of full attention (where it has such), experts in it if the target has them."""
    fields = copy.deepcopy(config.get_text_config().to_dict())
    fields |= {"num_hidden_layers": 1, "vocab_size": SMALL, "tie_word_embeddings": False}
    fields |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if types := fields.get("layer_types"):
        fields["layer_types"] = ["full_attention" if "full_attention" in types else types[-1]]
    if types := fields.get("mlp_layer_types"):
        fields["mlp_layer_types"] = [types[-1]]
    for name, value in (("first_k_dense_replace", 0), ("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if name in fields:
            fields[name] = value
    fields.pop("quantization_config", None)
    fields.pop("model_type", None)
    return type(config.get_text_config())(**fields)


def _one_layer(config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(one_layer_config(config), dtype=torch.float32)
    if len(model.base_model.layers) != 1 or not isinstance(getattr(model.base_model, "norm", None), nn.Module):
        raise ValueError(f"mtp: a {config.model_type} has no layers and norm of the usual names; no head for it")
    return model.eval()
