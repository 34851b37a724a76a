"""The flag-driven text encoder: whole texts in, one state for each of their tokens out.

Texts of a batch lie behind each other as one flat row of tokens, the short ones first. Linears see
rows; attention sees the texts of one length together, unpadded. So a text's states depend on itself
alone, whatever it is batched with.

A run is a generator that gives way after each layer: the caller may look after other work between
two layers of a long text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..layers.linear import Linear
from .config import BadModel
from .container import Container
from .encoder_config import EncoderConfig
from .encoder_names import EncoderNames, names_of

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}

Run = Generator[None, None, list[Tensor]]
Groups = Sequence[tuple[int, int]]  # so many texts of so many tokens, one group after another


class _Norm:
    """LayerNorm or RMSNorm, whichever the configuration says; weights in float32."""

    def __init__(self, config: EncoderConfig, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight + 1 if config.norm == "rms_plus_one" else weight
        self._bias = bias
        self._is_layer_norm = config.norm == "layer"
        self._eps = config.norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        wide, shape = x.float(), self._weight.shape
        if self._is_layer_norm:
            normed = functional.layer_norm(wide, shape, self._weight, self._bias, self._eps)
        else:
            normed = functional.rms_norm(wide, shape, self._weight, self._eps)
        return normed.to(x.dtype)


class _Loader:
    """Finds an encoder's tensors in the container, checks their shapes and counts their bytes."""

    def __init__(self, container: Container, config: EncoderConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.size_bytes = 0
        self._container = container
        self._names, self._prefix = self._spelling()

    def _spelling(self) -> tuple[EncoderNames, str]:
        is_gguf = self._container.format == "gguf"
        tried = names_of(self.config.architecture, self.config.placement, is_gguf)
        for names in tried:
            for prefix in names.prefixes:
                first = f"{prefix}{names.layer.format(0)}{names.parts['down'][0][0]}.weight"
                if first in self._container.names:
                    return names, prefix
        first = tried[0].layer.format(0) + tried[0].parts["down"][0][0]
        raise BadModel(f"the model has no tensor {first}.weight")

    def table(self, part: str, num_rows: int | None = None) -> Tensor | None:
        """An embedding's rows, or None if the model has none of this kind."""
        stem = self._names.top.get(part)
        name = f"{self._prefix}{stem}.weight"
        if stem is None or name not in self._container.names:
            return None
        found = self._counted(self._container.tensor(name, self.dtype))
        rows = found.shape[0] if num_rows is None else num_rows
        return self._shaped(name, found, (rows, self.config.hidden_size))

    def top_norm(self, part: str) -> _Norm | None:
        """None if the model has no such norm."""
        stem = self._names.top.get(part)
        return None if stem is None else self._norm(self._prefix + stem, self.config.hidden_size)

    def norm(self, layer: int, part: str, width: int) -> _Norm | None:
        """None if the layer has no such norm."""
        stems = self._stems(layer, part)
        return None if stems is None else self._norm(stems[0], width)

    def linear(self, layer: int, part: str, num_outputs: int, num_inputs: int) -> Linear:
        """The matrices of this part as one. Raises BadModel if one is missing."""
        stems = self._stems(layer, part)
        if stems is None:
            missing = self._names.parts[part][0][0]
            raise BadModel(
                f"the model has no tensor {self._prefix}{self._names.layer.format(layer)}"
                f"{missing}.weight"
            )
        weights = [self._container.tensor(f"{stem}.weight", self.dtype) for stem in stems]
        widths = {weight.shape[-1] for weight in weights}
        if len(widths) > 1:
            raise BadModel(f"{', '.join(stems)}: shapes do not fit together")
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._shaped(f"{stems[0]}.weight", weight, (num_outputs, num_inputs))
        bias = None
        if f"{stems[0]}.bias" in self._container.names:
            biases = [self._container.tensor(f"{stem}.bias", self.dtype) for stem in stems]
            bias = self._counted(torch.cat(biases))
            self._shaped(f"{stems[0]}.bias", bias, (num_outputs,))
        linear = Linear(weight, bias)
        self.size_bytes += linear.size_bytes
        return linear

    def _stems(self, layer: int, part: str) -> tuple[str, ...] | None:
        prefix = self._prefix + self._names.layer.format(layer)
        for spelling in self._names.parts.get(part, ()):
            stems = tuple(prefix + stem for stem in spelling)
            if all(f"{stem}.weight" in self._container.names for stem in stems):
                return stems
        return None

    def _norm(self, stem: str, width: int) -> _Norm | None:
        if f"{stem}.weight" not in self._container.names:
            return None
        weight = self._counted(self._container.tensor(f"{stem}.weight", torch.float32))
        bias = None
        if f"{stem}.bias" in self._container.names:
            bias = self._counted(self._container.tensor(f"{stem}.bias", torch.float32))
        return _Norm(self.config, self._shaped(f"{stem}.weight", weight, (width,)), bias)

    def _counted(self, tensor: Tensor) -> Tensor:
        self.size_bytes += tensor.nbytes
        return tensor

    @staticmethod
    def _shaped(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise BadModel(f"{name} has shape {tuple(tensor.shape)}, {shape} expected")
        return tensor


class _Layer:
    """One block of the network."""

    def __init__(self, load: _Loader, index: int) -> None:
        config = load.config
        hidden, inner = config.hidden_size, config.intermediate_size
        mixed = config.num_heads * config.head_dim
        self._config = config
        self._reach = config.reach(index)
        self._split = [mixed, *[config.num_kv_heads * config.head_dim] * 2]
        self._qkv = load.linear(index, "qkv", sum(self._split), hidden)
        self._output = load.linear(index, "output", hidden, mixed)
        self._up = load.linear(index, "up", inner * (2 if config.is_gated else 1), hidden)
        self._down = load.linear(index, "down", hidden, inner)
        self._attention_norm = load.norm(index, "attention_norm", hidden)
        self._mlp_norm = self._needed(load.norm(index, "mlp_norm", hidden), index)
        if config.placement == "post":
            self._attention_norm = self._needed(self._attention_norm, index)
        self._attention_out_norm = load.norm(index, "attention_out_norm", hidden)
        self._mlp_out_norm = load.norm(index, "mlp_out_norm", hidden)
        self._query_norm = self._key_norm = None
        if config.has_qk_norm:
            self._query_norm = self._needed(load.norm(index, "query_norm", config.head_dim), index)
            self._key_norm = self._needed(load.norm(index, "key_norm", config.head_dim), index)
        self._activate = _ACTIVATIONS[config.activation]

    @staticmethod
    def _needed(norm: _Norm | None, index: int) -> _Norm:
        if norm is None:
            raise BadModel(f"layer {index} of the model lacks a norm")
        return norm

    def __call__(
        self, hidden: Tensor, groups: Groups, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        if self._config.placement == "post":
            assert self._attention_norm is not None
            hidden = self._attention_norm(hidden + self._attend(hidden, groups, angles))
            return self._mlp_norm(hidden + self._transform(hidden))
        normed = hidden if self._attention_norm is None else self._attention_norm(hidden)
        mixed = self._attend(normed, groups, angles)
        if self._attention_out_norm is not None:
            mixed = self._attention_out_norm(mixed)
        hidden = hidden + mixed
        made = self._transform(self._mlp_norm(hidden))
        return hidden + (made if self._mlp_out_norm is None else self._mlp_out_norm(made))

    def _transform(self, x: Tensor) -> Tensor:
        if not self._config.is_gated:
            return self._down(self._activate(self._up(x)))
        gate, up = self._up(x).chunk(2, dim=-1)
        # Contiguous, since vector code rounds other than the scalar code that strided rows get.
        return self._down(self._activate(gate.contiguous()) * up)

    def _attend(self, x: Tensor, groups: Groups, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        config = self._config
        query, key, value = torch.split(self._qkv(x), self._split, dim=-1)
        query = query.reshape(len(x), config.num_heads, config.head_dim)
        key = key.reshape(len(x), config.num_kv_heads, config.head_dim)
        value = value.reshape(len(x), config.num_kv_heads, config.head_dim)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        if angles is not None:
            query, key = _rotated(query, *angles), _rotated(key, *angles)
        sizes = [count * length for count, length in groups]
        split = [torch.split(rows, sizes) for rows in (query, key, value)]
        parts = zip(groups, *split, strict=True)
        mixed = [self._attend_alike(count, q, k, v) for (count, _), q, k, v in parts]
        return self._output(torch.cat(mixed))

    def _attend_alike(self, count: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`count` texts of one length: [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
        config, length = self._config, len(query) // count
        mask = None
        if self._reach is not None and length > self._reach + 1:
            at = torch.arange(length)
            mask = (at[:, None] - at[None, :]).abs() <= self._reach
            if config.is_causal:
                mask &= at[:, None] >= at[None, :]

        def by_head(x: Tensor) -> Tensor:
            return x.view(count, length, *x.shape[1:]).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            by_head(query),
            by_head(key),
            by_head(value),
            attn_mask=mask,
            is_causal=config.is_causal and mask is None and length > 1,
            scale=config.score_scale,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        return mixed.transpose(1, 2).reshape(count * length, -1)


class Encoder:
    """A loaded network.

    `progress` gets the share of the layers that are loaded. Raises BadModel if a tensor is missing
    or of another shape than the configuration says.
    """

    def __init__(
        self,
        container: Container,
        config: EncoderConfig,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.config = config
        load = _Loader(container, config, dtype)
        tokens = load.table("tokens", config.vocab_size)
        if tokens is None:
            raise BadModel("the model has no token embedding")
        self._tokens = tokens
        self._positions = self._position_table(load)
        self._types = load.table("types")
        self._embedding_norm = load.top_norm("embedding_norm")
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_Layer(load, index))
            progress((index + 1) / config.num_layers)
        self._last_norm = load.top_norm("last_norm")
        self.weights_bytes = load.size_bytes

    @staticmethod
    def _position_table(load: _Loader) -> Tensor | None:
        first = load.config.first_position
        if first is None:
            return None
        table = load.table("positions")
        if table is None or len(table) < first + load.config.context_length:
            raise BadModel(
                f"the position embedding has {0 if table is None else len(table)} rows, "
                f"{first + load.config.context_length} expected"
            )
        return table[first:]

    def run(self, texts: Sequence[Sequence[int]]) -> Run:
        """Gives way after each layer; returns the states [num_tokens, hidden_size] of each text."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        lengths = [len(texts[index]) for index in order]
        groups = [(count, length) for length, count in Counter(lengths).items()]
        positions = torch.cat([torch.arange(length) for length in lengths])
        token_ids = torch.tensor([token_id for index in order for token_id in texts[index]])
        thetas = self.config.rope_thetas or (None,) * len(self._layers)
        angles = {
            theta: None if theta is None else _angles(theta, self.config.head_dim, positions)
            for theta in set(thetas)
        }
        hidden = self._embed(token_ids, positions)
        for layer, theta in zip(self._layers, thetas, strict=True):
            with torch.inference_mode():
                hidden = layer(hidden, groups, angles[theta])
            yield
        with torch.inference_mode():
            if self._last_norm is not None:
                hidden = self._last_norm(hidden)
            states = dict(zip(order, torch.split(hidden, lengths), strict=True))
        return [states[index] for index in range(len(texts))]

    @torch.inference_mode()
    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self._tokens[token_ids] * self.config.embedding_scale
        if self._types is not None:
            hidden = hidden + self._types[0]
        if self._positions is not None:
            hidden = hidden + self._positions[positions]
        return hidden if self._embedding_norm is None else self._embedding_norm(hidden)


def _angles(theta: float, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [num_tokens, 1, head_dim / 2], in float32."""
    half = head_dim // 2
    frequencies = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float32)
    angles = torch.outer(positions.float(), frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim]: element i turns with element i + head_dim / 2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
