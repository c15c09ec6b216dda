"""One MLA layer of Kimi-K3 in decode: multi-head latent attention in its absorbed form, without rotation, with an
output gate, its cache sharded over the ranks of a DCP group.

MLA keeps one latent row of 576 a token instead of keys and values of 96 heads (DeepSeek-V2, 2024). "Absorbed": the part
of kv_b_proj that makes keys is multiplied into the query, the part that makes values is applied behind the attention,
so that attention reads the latent rows as they are."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.nn.functional import linear

import dcpkernels
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.attention import Attention, attention_for
from dcpkernels.kimi_k3.cache import DecodeBatch, LatentCache
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.norms import rms_norm
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw, draw_each, draw_norm


@dataclass(frozen=True)
class MLAWeights:
    """One rank's: Hr of the H heads, and the projections to the latents, which every rank has whole. Rows are
    outputs, as in torch.nn.Linear."""

    q_a_proj: torch.Tensor  # [q_lora_rank, hidden]
    q_a_norm: torch.Tensor  # [q_lora_rank]
    q_b_proj: torch.Tensor  # [Hr, nope + rope, q_lora_rank]
    kv_a_proj: torch.Tensor  # [kv_lora_rank + rope, hidden]
    kv_a_norm: torch.Tensor  # [kv_lora_rank]
    w_uk: torch.Tensor  # [Hr, nope, kv_lora_rank]: a head's keys from the latent, absorbed into the query
    w_uv: torch.Tensor  # [Hr, v_head_dim, kv_lora_rank]: its values from the latent
    g_proj: torch.Tensor  # [Hr * v_head_dim, hidden]
    o_proj: torch.Tensor  # [hidden, Hr * v_head_dim]

    @classmethod
    def random(cls, config: KimiK3Config, tp: TensorParallel, *, key: object, dtype: torch.dtype) -> MLAWeights:
        """This rank's part of random weights that `key` names. A rank draws its own heads only."""
        heads, latent, hidden = tp.range("num_heads", config.num_heads), config.kv_lora_rank, config.hidden_size

        def of_heads(name: str, *shape: int, std: float | None = None) -> torch.Tensor:
            return draw_each(heads, *shape, key=(key, name), dtype=dtype, std=std)

        # A head's columns of o_proj are drawn as rows, and turned: [Hr, v, hidden] -> [hidden, Hr * v].
        o_proj = of_heads("o_proj", config.v_head_dim, hidden, std=(config.num_heads * config.v_head_dim) ** -0.5)
        return cls(
            q_a_proj=draw(config.q_lora_rank, hidden, key=(key, "q_a_proj"), dtype=dtype),
            q_a_norm=draw_norm(config.q_lora_rank, key=(key, "q_a_norm"), dtype=dtype),
            q_b_proj=of_heads("q_b_proj", config.qk_head_dim, config.q_lora_rank),
            kv_a_proj=draw(config.latent_dim, hidden, key=(key, "kv_a_proj"), dtype=dtype),
            kv_a_norm=draw_norm(latent, key=(key, "kv_a_norm"), dtype=dtype),
            w_uk=of_heads("w_uk", config.qk_nope_head_dim, latent),
            w_uv=of_heads("w_uv", config.v_head_dim, latent),
            g_proj=of_heads("g_proj", config.v_head_dim, hidden).flatten(0, 1),
            o_proj=o_proj.flatten(0, 1).T.contiguous(),
        )

    def to(self, device: torch.device | str) -> MLAWeights:
        """The same weights on `device`."""
        return MLAWeights(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


class MLALayer:
    """The layer on one rank.

    Args:
        weights: of this rank's heads.
        cache: this layer's, on this rank.
        tp: the ranks that share the heads.
        workspace: of the DCP group, to which this rank belongs and whose size divides tp's: made with
            num_heads = heads of its ranks together, head_dim = kv_lora_rank, query_head_dim = latent_dim
            (`workspace_config`). None: the cache is not sharded, every rank has all of it (DCP size 1).
        attention: what attends to a shard; called and returns as `attention.local_attention`. None: by device.
        lane: which of the workspace's streams. Layers that follow each other share one.

    Raises DcpInvalidArgument for a cache or a workspace that does not fit.
    """

    def __init__(
        self,
        config: KimiK3Config,
        weights: MLAWeights,
        cache: LatentCache,
        tp: TensorParallel,
        workspace: dcpkernels.Workspace | None = None,
        *,
        attention: Attention | None = None,
        lane: int = 0,
    ) -> None:
        self.config, self.weights, self.cache, self.tp = config, weights, cache, tp
        self.workspace, self.lane = workspace, lane
        self.attention = attention or attention_for(cache.blocks.device)
        if cache.blocks.shape[2] != config.latent_dim:
            raise DcpInvalidArgument(
                f"kimi_k3: cache must have rows of {config.latent_dim} (got {cache.blocks.shape[2]})"
            )
        if workspace is None:
            return
        expected = workspace_config(config, tp, workspace.num_ranks, max_num_tokens=1, dtype=weights.w_uk.dtype)
        for name in ("num_heads", "head_dim", "query_head_dim", "dtype", "query_dtype"):
            given, wanted = getattr(workspace.config, name), getattr(expected, name)
            if given != wanted:
                raise DcpInvalidArgument(f"kimi_k3: workspace.config.{name} must be {wanted} (got {given})")
        if not 0 <= lane < workspace.config.num_lanes:
            raise DcpInvalidArgument(f"kimi_k3: lane must be in 0 .. {workspace.config.num_lanes - 1} (got {lane})")

    def __call__(self, x: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """x [T, hidden], the normalised hidden states of all rows, the same on all ranks -> [T, hidden], the same on
        all ranks. Collective over the ranks. Adds the rows to the cache first, so that a row sees itself.

        Raises DcpInvalidArgument, before anything is written, for a batch of other rows than x, sharded otherwise
        than this layer's cache, or with more rows than the workspace is made for; and what the collectives raise."""
        self.check(batch)
        batch.require_rows(x)
        query, row = self.project(x)
        self.cache.append(row, batch.slot_mapping)
        return self.finish(x, self.attend(query, batch))

    def check(self, batch: DecodeBatch) -> None:
        """Raises DcpInvalidArgument for a batch that this layer cannot run."""
        num_ranks = 1 if self.workspace is None else self.workspace.num_ranks
        if batch.num_ranks != num_ranks:
            raise DcpInvalidArgument(
                f"kimi_k3: batch must be of a RequestTable with num_ranks={num_ranks}, the DCP size "
                f"(got {batch.num_ranks})"
            )
        if self.workspace is not None and batch.num_rows > self.workspace.config.max_num_tokens:
            raise DcpInvalidArgument(
                f"kimi_k3: batch must have at most max_num_tokens={self.workspace.config.max_num_tokens} rows "
                f"(got {batch.num_rows})"
            )

    def project(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """x [T, hidden] -> the query of this rank's heads in two parts, (latent [T, Hr, kv_lora_rank], rope [T, Hr,
        rope]), and the cache's row [T, latent_dim]. No rotation anywhere: positions come in through KDA layers."""
        w, config = self.weights, self.config
        q_latent = rms_norm(linear(x, w.q_a_proj), w.q_a_norm, config.latent_norm_eps)
        kv_latent, k_rope = linear(x, w.kv_a_proj).split([config.kv_lora_rank, config.qk_rope_head_dim], 1)
        row = torch.cat([rms_norm(kv_latent, w.kv_a_norm, config.latent_norm_eps), k_rope], 1)  # k_rope as it is
        query = linear(q_latent, w.q_b_proj.flatten(0, 1)).unflatten(1, w.q_b_proj.shape[:2])
        q_nope, q_rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], 2)
        return (per_head(q_nope, w.w_uk), q_rope), row

    def attend(self, query: tuple[torch.Tensor, torch.Tensor], batch: DecodeBatch) -> torch.Tensor:
        """Attention of this rank's heads over the whole context, wherever it is: [T, Hr, kv_lora_rank]."""
        return self.merge(*self.attend_to_shard(self.gather_query(query), batch), batch)

    def gather_query(self, query: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The two parts of this rank's heads -> [T, H', latent_dim]: all heads of the DCP group, each straight into its
        place in one buffer."""
        if self.workspace is None:
            return torch.cat(query, 2)
        return dcpkernels.query_gather(query, workspace=self.workspace, lane=self.lane)

    def attend_to_shard(self, query: torch.Tensor, batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of those heads over the tokens that are here: (partial out [T, H', kv_lora_rank], LSE [T, H'])."""
        # In memory of the workspace, where the other ranks read it.
        out = None if self.workspace is None else self.workspace.partial_out(batch.num_rows, lane=self.lane)
        return self.attention(
            query,
            self.cache.blocks,
            batch,
            scale=self.config.softmax_scale,
            value_dim=self.config.kv_lora_rank,
            out=out,
        )

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """Partial outputs to the ranks of their heads, merged there by LSE: [T, Hr, kv_lora_rank].

        That every rank has come this far ends the life of the gathered query.
        """
        if self.workspace is None:
            return partial_out.masked_fill_((partial_lse == -torch.inf)[..., None], 0)  # padding rows
        # An empty shard is told by its length, row by row: with several query tokens a request may have tokens here
        # that its first rows do not see. So every row is a sequence of its own.
        each_row = torch.arange(batch.num_rows + 1, dtype=torch.int32, device=partial_out.device)
        return dcpkernels.a2a_lse_reduce(
            partial_out,
            partial_lse,
            workspace=self.workspace,
            lse_base="e",
            seq_lens=batch.local_lens,
            query_start_loc=each_row,
            lane=self.lane,
        )

    def finish(self, x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """From the latent [T, Hr, kv_lora_rank] to the layer's output [T, hidden], summed over the ranks."""
        return self.tp.all_reduce(linear(self.values_of(latent) * self.gate(x), self.weights.o_proj))

    def values_of(self, latent: torch.Tensor) -> torch.Tensor:
        """[T, Hr * v_head_dim]: the value projection, which follows attention because it is linear."""
        return per_head(latent, self.weights.w_uv.transpose(1, 2)).flatten(1)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """[T, Hr * v_head_dim]: what each value is multiplied with before the output projection."""
        return torch.sigmoid(linear(x, self.weights.g_proj).float()).to(x.dtype)


def workspace_config(
    config: KimiK3Config,
    tp: TensorParallel,
    dcp_size: int,
    *,
    max_num_tokens: int,
    dtype: torch.dtype,
    num_lanes: int = 1,
) -> dcpkernels.WorkspaceConfig:
    """For the workspace of one DCP group of `dcp_size` ranks, a divisor of tp.size. Raises DcpInvalidArgument."""
    if dcp_size < 1 or tp.size % dcp_size:
        raise DcpInvalidArgument(f"kimi_k3: dcp_size must divide the {tp.size} ranks (got {dcp_size})")
    return dcpkernels.WorkspaceConfig(
        num_heads=tp.share("num_heads", config.num_heads) * dcp_size,
        head_dim=config.kv_lora_rank,
        max_num_tokens=max_num_tokens,
        dtype=dtype,
        num_lanes=num_lanes,
        query_head_dim=config.latent_dim,
        query_dtype=dtype,
        zero_copy=True,
    )


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, H, A] @ [H, A, B] -> [T, H, B]: every head has its own matrix."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
