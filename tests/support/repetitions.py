"""A repetition of a load whose requests take given times, as the load generator reports it."""

from __future__ import annotations

import numpy as np

from kimi_w4a8_lab.speed.generator import LoadDetails, LoadResult
from kimi_w4a8_lab.speed.statistics import Repetition


def repetition(tpots_ms: list[float], tokens: int = 11) -> Repetition:
    """A repetition whose requests have exactly these times per output token."""
    itls = [[tpot / 1000] * (tokens - 1) for tpot in tpots_ms]
    details = LoadDetails(
        input_lens=[1] * len(itls),
        output_lens=[tokens] * len(itls),
        ttfts=[0.1] * len(itls),
        itls=itls,
        generated_texts=[""] * len(itls),
        errors=[""] * len(itls),
    )
    figures = dict.fromkeys(LoadResult.model_fields, 1.0) | {"max_concurrency": 1, "completed": len(itls)}
    figures |= {"total_input_tokens": 1, "total_output_tokens": 1, "median_tpot_ms": float(np.median(tpots_ms))}
    return Repetition(LoadResult.model_validate(figures), details)
