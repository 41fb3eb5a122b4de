"""Drawing a step's tokens where their logits are: `sampler.py` for a device. Only what was drawn comes to the host.

The same order: edits, temperature, top_k, top_p, min_p; log probabilities of the unedited logits. Noise is the same
function of (seed, choice, position), filters compare the same logits, and ties are kept as there. So from equal logits
a seeded token is that of the CPU, but where the noise or a share of top_p falls within rounding of a boundary between
two tokens, or a logit within rounding of min_p's: exponentials and their sums, and min_p's logarithm, are not rounded
alike. Compared with the CPU's tokens in Triton's interpreter (tests/kernels/twins/test_sampling.py).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sample import SamplingRows, sample
from worker.engine.outputs import SampledToken
from worker.model.device import Accelerator
from worker.model.logit_edits import LogitEdits
from worker.model.sampler import SamplingBatch
from worker.model.staging import Staging, staged_bytes

_ROW_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
_MIN_EDIT_BYTES = 1 << 16


@dataclass(slots=True)
class Drawing:
    """The draw of one step, between its queueing and its end. The tensors are pinned and filled by the device."""

    tokens: Tensor  # int64 [num_rows]; -1: the row is no distribution
    reported: NDArray[np.int64]  # [num_reported]: rows that asked for log probabilities
    num_top: NDArray[np.int64]  # [num_reported]: how many alternatives each wants
    chosen: Tensor | None = None  # float32 [num_reported], logarithms
    top_ids: Tensor | None = None  # int64 [num_reported, largest num_top], most likely first
    top: Tensor | None = None  # float32, their logarithms

    def sampled(self) -> list[SampledToken | None]:
        """Once the device is done; as `sampler.sample`."""
        tokens: list[SampledToken | None] = [SampledToken(i) if i >= 0 else None for i in self.tokens.tolist()]
        if self.chosen is None:
            return tokens
        for i, (row, logprob) in enumerate(zip(self.reported.tolist(), self.chosen.tolist(), strict=True)):
            token = tokens[row]
            if token is not None:
                tokens[row] = SampledToken(token.token_id, logprob, self._alternatives(i))
        return tokens

    def _alternatives(self, i: int) -> tuple[tuple[int, float], ...]:
        if self.top is None or self.top_ids is None:
            return ()
        count = int(self.num_top[i])
        pairs = zip(self.top_ids[i, :count].tolist(), self.top[i, :count].tolist(), strict=True)
        return tuple(pair for pair in pairs if pair[1] > -np.inf)  # what the model rules out is none


class DeviceSampler:
    def __init__(self, accelerator: Accelerator, max_num_seqs: int):
        self._accelerator = accelerator
        self._tokens = accelerator.pinned(max_num_seqs, dtype=torch.int64)
        self._edits: Staging | None = None  # made when a step needs it, and larger ones when it is too small
        self._edit_bytes = 0

    def arrays(self, batch: SamplingBatch, noise: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        """What `queue` wants on the device for `batch`. `noise`: `InputBatch.noise` of its rows."""
        return {
            "temperature": batch.temperature,
            "top_k": batch.top_k,
            "top_p": batch.top_p,
            "min_p": batch.min_p,
            "reported": np.flatnonzero(batch.num_logprobs >= 0),
            **noise,
        }

    def begin(self, batch: SamplingBatch, vocab_size: int) -> tuple[Drawing, dict[str, Tensor] | None]:
        """On the host: room for what comes back, and the edits, whose copy to the device is queued."""
        reported = np.flatnonzero(batch.num_logprobs >= 0)
        num_top = np.minimum(batch.num_logprobs[reported], vocab_size)
        drawing = Drawing(self._tokens[: len(batch.temperature)], reported, num_top)
        if len(reported):
            pinned, width = self._accelerator.pinned, int(num_top.max())
            drawing.chosen = pinned(len(reported), dtype=torch.float32)
            if width:
                drawing.top_ids = pinned(len(reported), width, dtype=torch.int64)
                drawing.top = pinned(len(reported), width, dtype=torch.float32)
        return drawing, None if batch.edits is None else self._load(batch.edits, vocab_size)

    def _load(self, edits: LogitEdits, vocab_size: int) -> dict[str, Tensor]:
        biased, penalised = edits.places(vocab_size)
        arrays = {
            "biased": biased,
            "bias": edits.bias_values,
            "penalised": penalised,
            "repetition": edits.repetition,
            "minus": edits.minus,
        }
        num_bytes = staged_bytes(arrays)
        if self._edits is None or num_bytes > self._edit_bytes:
            self._edit_bytes = max(_MIN_EDIT_BYTES, 2 * num_bytes)
            self._edits = Staging(self._edit_bytes, self._accelerator)
        return self._edits.load(arrays)

    def draw(self, logits: Tensor, rows: dict[str, Tensor], edits: dict[str, Tensor] | None, drawing: Drawing) -> None:
        """Queues the draw from `logits`, float32 [num_rows, vocab_size], which edits change. `rows`: of `arrays`."""
        unedited = logits
        if edits is not None:
            unedited = logits.clone() if drawing.chosen is not None else logits
            _edit(logits.view(-1), edits)
        tokens = sample(logits, SamplingRows(**{name: rows[name] for name in _ROW_FIELDS}))
        drawing.tokens.copy_(tokens, non_blocking=True)
        if drawing.chosen is None:
            return
        own = unedited.index_select(0, rows["reported"])
        total = own.logsumexp(dim=-1, keepdim=True)
        drawn = tokens.index_select(0, rows["reported"]).clamp_(min=0)[:, None]
        drawing.chosen.copy_((own.gather(1, drawn) - total)[:, 0], non_blocking=True)
        if drawing.top is not None and drawing.top_ids is not None:
            # Stable: of equals the lowest id first.
            values, ids = own.sort(dim=-1, descending=True, stable=True)
            width = drawing.top.shape[1]
            drawing.top.copy_(values[:, :width] - total, non_blocking=True)
            drawing.top_ids.copy_(ids[:, :width].contiguous(), non_blocking=True)


def _edit(flat: Tensor, edits: dict[str, Tensor]) -> None:
    """As `LogitEdits.apply`, on logits as one row."""
    biased, penalised = edits["biased"], edits["penalised"]
    flat.scatter_(0, biased, flat.gather(0, biased) + edits["bias"])
    before = flat.gather(0, penalised)
    scaled = torch.where(before > 0, before / edits["repetition"], before * edits["repetition"])
    flat.scatter_(0, penalised, scaled - edits["minus"])
