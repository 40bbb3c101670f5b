"""What comes back from the scheduler, in the process that holds the connections: an error in it ends one request.

SGLang ends the engine when one request's output raises there, and all others wait for as long as that takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any

logger = logging.getLogger(__name__)

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
TARGET = f"{_MANAGER}._handle_batch_output"
ABORT = f"{_MANAGER}._handle_abort_req"
ABORTED = f"{_MANAGER}._handle_abort_finish_reason"

# What the content of a request can raise. MemoryError and OSError are the machine's.
OF_CONTENT = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip
# What SGLang's endpoints read before they look at the reason; what was put together of it may not fit together.
_NO_LOGPROBS: dict[str, Any] = {"output_token_logprobs_length": 0} | {
    f"{side}_{kind}_logprobs": [] for side in ("input", "output") for kind in ("token", "top", "token_ids")
}


async def handle_batch_output(original: Callable[..., Coroutine[Any, Any, None]], manager: Any, recv_obj: Any) -> None:
    """AROUND hook of `TARGET`, which goes through the requests of a batch: ends the one that raises and goes on."""
    while True:
        try:
            await original(manager, recv_obj)
            return
        except OF_CONTENT as error:
            at = _place(error)
            if at is None:
                raise
            _end_alone(manager, recv_obj, at, error)


def handle_abort(original: Callable[..., None], manager: Any, recv_obj: Any) -> None:
    """AROUND hook of `ABORT`: an answer whose logprobs cannot be put together ends without them.

    Seen with SGLang 0.5.20: a request with logprobs that is aborted before its prefill has None in place of them.
    """
    state = manager.rid_to_state.get(recv_obj.rid)
    try:
        original(manager, recv_obj)
    except OF_CONTENT as error:
        logger.error("the logprobs of an aborted request raised: %s", recv_obj.rid, exc_info=error)
        state.obj.return_logprob = False
        original(manager, recv_obj)
        state.out_list[-1]["meta_info"].update(_NO_LOGPROBS)


def name_status(_: Any, out: dict[str, Any], *__: Any, **___: Any) -> None:
    """BEFORE hook of `ABORTED`, which ends an aborted request.

    SGLang writes an error into a stream only for an HTTPStatus, which its own transport turns into a number.
    """
    reason = out["meta_info"]["finish_reason"]
    if isinstance(reason.get("status_code"), int):
        with suppress(ValueError):
            reason["status_code"] = HTTPStatus(reason["status_code"])


def reason_of(error: Exception) -> dict[str, Any]:
    """What the client reads: the kind of error only, because its text may hold what others asked."""
    message = f"this request failed inside the engine ({type(error).__name__}) and was ended; the server goes on"
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}


def _place(error: BaseException) -> dict[str, Any] | None:
    """The local variables of SGLang's loop over the requests where it raised; None before its first one."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == TARGET.rpartition(".")[2]:
            at = trace.tb_frame.f_locals
            return at if at.get("state") is not None else None
        trace = trace.tb_next
    return None


def _end_alone(manager: Any, recv_obj: Any, at: dict[str, Any], error: Exception) -> None:
    """Answer the request at `at`, and leave only those behind it in `recv_obj`."""
    # SGLang's import order: hooks load before what they change
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.io_struct import AbortReq

    index, rid, waiting = at["i"], at["rid"], at["pending_notify"]
    recv_obj.rids[: index + 1] = [HEALTH_CHECK_RID_PREFIX] * (index + 1)  # SGLang passes over those it does not know
    reason = recv_obj.finished_reasons[index]
    refused = reason is not None and reason["type"] == "abort"  # the reason that the scheduler gave stays
    logger.error("the output of a request raised and it ends with its error: %s", rid, exc_info=error)
    if reason is None:
        manager.abort_request(rid)  # the scheduler still works on it
    if rid not in waiting:
        manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason if refused else reason_of(error)))
    for each in waiting.values():
        each.event.set()
