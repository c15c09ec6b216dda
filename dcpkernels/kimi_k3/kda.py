"""One KDA layer of Kimi-K3 in decode: Kimi Delta Attention (Kimi Linear, arXiv 2510.26692), linear attention whose
state is a matrix a head, corrected by the delta rule and decaying per channel.

Nothing here depends on the DCP size: state is sharded by head, and a request's does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.cache import DecodeBatch
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.norms import rms_norm
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw, draw_each, draw_norm


@dataclass(frozen=True)
class KDAWeights:
    """One rank's: Hr of the H heads, K channels each (keys and values have as many). Rows are outputs."""

    qkv_proj: torch.Tensor  # [3 * Hr * K, hidden]: queries, keys, values
    conv: torch.Tensor  # [3 * Hr * K, width]: of each channel, the newest input last
    f_a_proj: torch.Tensor  # [K, hidden], the same on all ranks
    f_b_proj: torch.Tensor  # [Hr * K, K]
    dt_bias: torch.Tensor  # fp32 [Hr, K]
    A_log: torch.Tensor  # fp32 [Hr]
    b_proj: torch.Tensor  # [Hr, hidden]
    g_proj: torch.Tensor  # [Hr * K, hidden]
    o_norm: torch.Tensor  # [K], the same for all heads
    o_proj: torch.Tensor  # [hidden, Hr * K]

    @classmethod
    def random(
        cls, config: KimiK3Config, tp: TensorParallel, *, key: tuple[object, ...], dtype: torch.dtype
    ) -> KDAWeights:
        """This rank's part of random weights that `key` names. A rank draws its own heads only."""
        heads, dim, hidden = tp.range("kda_num_heads", config.kda_num_heads), config.kda_head_dim, config.hidden_size

        def of_heads(name: str, *shape: int, std: float | None = None, dtype: torch.dtype = dtype) -> torch.Tensor:
            return draw_each(heads, *shape, key=(*key, name), dtype=dtype, std=std)

        qkv = of_heads("qkv_proj", 3, dim, hidden).transpose(0, 1)  # [3, Hr, K, hidden]
        conv = of_heads("conv", 3, dim, config.kda_conv_width).transpose(0, 1)
        o_proj = of_heads("o_proj", dim, hidden, std=config.kda_dim**-0.5)
        return cls(
            qkv_proj=qkv.flatten(0, 2),
            conv=conv.flatten(0, 2),
            f_a_proj=draw(dim, hidden, key=(*key, "f_a_proj"), dtype=dtype),
            f_b_proj=of_heads("f_b_proj", dim, dim).flatten(0, 1),
            # Slow and fast channels and heads: with -3 a channel keeps about 0.8 of itself a token, with 0 a twelfth.
            dt_bias=of_heads("dt_bias", dim, std=1.0, dtype=torch.float32) - 3.0,
            A_log=of_heads("A_log", 1, std=0.5, dtype=torch.float32).flatten(),
            b_proj=of_heads("b_proj", hidden),
            g_proj=of_heads("g_proj", dim, hidden).flatten(0, 1),
            o_norm=draw_norm(dim, key=(*key, "o_norm"), dtype=dtype),
            o_proj=o_proj.flatten(0, 1).T.contiguous(),
        )


# -- the mathematics of one token


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim: eps is added to the sum, not to a mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def kda_gate(f: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """Log of the decay of each channel, in (lower_bound, 0): lower_bound * sigmoid(exp(A_log) * (f + dt_bias)), fp32.
    f [..., H, K], A_log [H], dt_bias [H, K]. (Kimi Linear has -exp(A_log) * softplus(f + dt_bias) here, unbounded.)"""
    return lower_bound * torch.sigmoid(A_log.float().exp()[:, None] * (f.float() + dt_bias.float()))


def kda_recurrent_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: (o [..., H, V], new state [..., H, V, K]), all fp32.

        S <- S diag(exp g)        S <- S + beta (v - S k) k^T        o = S q

    q (normalised and scaled), k (normalised), g (log decay): [..., H, K]; v [..., H, V]; beta [..., H]; state [...,
    H, V, K]."""
    state = state * g.exp()[..., None, :]
    error = beta[..., None] * (v - (state @ k[..., None]).squeeze(-1))
    state = state + error[..., None] * k[..., None, :]
    return (state @ q[..., None]).squeeze(-1), state


def causal_conv_step(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(sum_j weight[c, j] * inputs[..., j, c]), fp32 inside: inputs [..., width, C], the newest last; weight [C,
    width] -> [..., C]."""
    return silu((inputs.float() * weight.float().T).sum(-2)).to(inputs.dtype)


# -- what is kept


class KDAState:
    """What one KDA layer keeps of each request on this rank: a matrix a head, and the last inputs of the convolution.

    A step may end in drafts that are rejected later. So it keeps the state behind each of its tokens, and the one
    before them: places 0 .. max_query_len, of which `current` says where the request is. A step copies that to place 0
    first, and writes the state behind its j-th token to place j.

    Args:
        max_requests: state slots, as of the RequestTable.
        max_query_len: tokens of one request in one step, at most.
    """

    def __init__(
        self, config: KimiK3Config, tp: TensorParallel, max_requests: int, max_query_len: int, dtype: torch.dtype
    ) -> None:
        num_heads, dim = tp.share("kda_num_heads", config.kda_num_heads), config.kda_head_dim
        places = (max_requests, max_query_len + 1)
        self.max_query_len = max_query_len
        self.recurrent = torch.zeros(*places, num_heads, dim, dim)  # fp32 [.., Hr, V, K]
        self.conv = torch.zeros(*places, config.kda_conv_width - 1, 3 * num_heads * dim, dtype=dtype)
        self.current = torch.zeros(max_requests, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        """For a new request in this slot: nothing seen. Raises DcpInvalidArgument for a slot that is none."""
        self._check(slot)
        self.recurrent[slot] = 0
        self.conv[slot] = 0
        self.current[slot] = 0

    def keep(self, slot: int, num_tokens: int) -> None:
        """Of the last step's tokens of a request the first `num_tokens` stay; all do until this is called.

        Raises DcpInvalidArgument for more than the step had, or a slot that is none.
        """
        self._check(slot)
        if not 0 <= num_tokens <= int(self.current[slot]):
            raise DcpInvalidArgument(
                f"kda: num_tokens must be in 0 .. {int(self.current[slot])}, those of the last step (got {num_tokens})"
            )
        self.current[slot] = num_tokens

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self.current):
            raise DcpInvalidArgument(f"kda: slot must be in 0 .. {len(self.current) - 1} (got {slot})")

    def begin(self, slots: torch.Tensor) -> None:
        """Brings the requests' states to place 0."""
        for kept in (self.recurrent, self.conv):
            kept[slots, 0] = kept[slots, self.current[slots]]


# -- the layer


class KDALayer:
    """The layer on one rank. `state` is this layer's alone."""

    def __init__(self, config: KimiK3Config, weights: KDAWeights, state: KDAState, tp: TensorParallel) -> None:
        self.config, self.weights, self.state, self.tp = config, weights, state, tp

    def check(self, batch: DecodeBatch) -> None:
        """Raises DcpInvalidArgument for a batch that this layer cannot run."""
        most = self.state.max_query_len
        longest = int(batch.query_start_loc.diff().max()) if len(batch.state_slots) else 0
        if longest > most:
            raise DcpInvalidArgument(
                f"kda: tokens of a request in a step must be at most max_query_len={most} (got {longest})"
            )

    def __call__(self, x: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """x [T, hidden], the normalised hidden states, the same on all ranks -> [T, hidden], the same on all ranks; 0
        in padding rows. Collective over the ranks.

        Raises DcpInvalidArgument for a request with more tokens than the state keeps, or an x of other rows than the
        batch, before anything is written."""
        self.check(batch)
        batch.require_rows(x)
        w, config, state = self.weights, self.config, self.state
        starts = batch.query_start_loc.long()
        lens = starts.diff()
        longest = int(lens.max()) if len(lens) else 0
        head_dim = config.kda_head_dim
        inputs = linear(x, w.qkv_proj)
        f = linear(linear(x, w.f_a_proj), w.f_b_proj).unflatten(1, (-1, head_dim))
        g = kda_gate(f, w.A_log, w.dt_bias, config.kda_gate_lower_bound)
        beta = torch.sigmoid(linear(x, w.b_proj).float())

        out = torch.zeros(len(x), *g.shape[1:])  # fp32 [T, Hr, V]; padding rows stay 0
        state.begin(batch.state_slots)
        state.current[batch.state_slots] = lens
        for j in range(longest):
            # The j-th token of all requests that have one; what a request keeps goes from place j to j + 1.
            live = lens > j
            rows, slots = starts[:-1][live] + j, batch.state_slots[live]
            window = torch.cat([state.conv[slots, j], inputs[rows][:, None]], 1)
            q, k, v = causal_conv_step(window, w.conv).float().unflatten(1, (3, -1, head_dim)).unbind(1)
            q, k = (l2_norm(each, config.kda_l2_eps) for each in (q, k))
            out[rows], state.recurrent[slots, j + 1] = kda_recurrent_step(
                q * head_dim**-0.5, k, v, g[rows], beta[rows], state.recurrent[slots, j]
            )
            state.conv[slots, j + 1] = window[:, 1:]
        gate = torch.sigmoid(linear(x, w.g_proj).float()).view(out.shape)
        # Selected, not multiplied: a padding row may hold NaN.
        gated = torch.where(
            batch.positions[:, None, None] >= 0, rms_norm(out, w.o_norm, config.rms_norm_eps) * gate, 0.0
        )
        return self.tp.all_reduce(linear(gated.flatten(1).to(x.dtype), w.o_proj))
