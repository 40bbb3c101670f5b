"""Keep an error in one request's output to that request, in the process that holds the clients' connections.

Without these hooks SGLang ends the engine when one request's output raises, and all other clients wait for a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from ...engine.given_folder import RECEIVED
from ..hooks import Feature
from .pulse_hook import leave
from .repeated_failures import count

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_HANDLER = "_handle_batch_output"
FEATURE = Feature(
    "outputs that fail alone", remove_when="SGLang ends only the request whose output raises", optional=True
)

# Errors that a request's content can cause. MemoryError and OSError are faults of the machine.
OF_CONTENT = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip
# Fields that SGLang's endpoints read before the finish reason; partial logprobs could be inconsistent.
_NO_LOGPROBS: dict[str, Any] = {"output_token_logprobs_length": 0} | {
    f"{side}_{kind}_logprobs": [] for side in ("input", "output") for kind in ("token", "top", "token_ids")
}


@FEATURE.around(f"{_MANAGER}.{_HANDLER}")
async def handle_batch_output(
    original: Callable[..., Coroutine[Any, Any, None]], manager: TokenizerManager, recv_obj: BatchStrOutput
) -> None:
    """End the request that raises in SGLang's loop over the requests of a batch, and continue with the others.

    SGLang counts thinking that drafts added beyond the token limit: there is never more of it than of the answer.
    """
    leave(RECEIVED)
    if counts := getattr(recv_obj, "reasoning_tokens", None):
        counts[:] = map(min, counts, recv_obj.completion_tokens)
    while True:
        try:
            await original(manager, recv_obj)
            return
        except OF_CONTENT as error:
            at = _place(error)
            if at is None:
                raise
            _end_alone(manager, recv_obj, at, error)


@FEATURE.around(f"{_MANAGER}._handle_abort_req")
def handle_abort(original: Callable[..., None], manager: TokenizerManager, recv_obj: AbortReq) -> None:
    """End an aborted request without logprobs when its logprobs raise.

    In SGLang 0.5.20, a request with logprobs that is aborted before its prefill has None in their place.
    """
    state = manager.rid_to_state.get(recv_obj.rid)
    try:
        original(manager, recv_obj)
    except OF_CONTENT as error:
        logger.error("the logprobs of an aborted request raised: %s", recv_obj.rid, exc_info=error)
        state.obj.return_logprob = False
        original(manager, recv_obj)
        state.out_list[-1]["meta_info"].update(_NO_LOGPROBS)


@FEATURE.before(f"{_MANAGER}._handle_abort_finish_reason")
def name_status(_: object, out: dict[str, Any], *__: object, **___: object) -> None:
    """Make the status of an aborted request an HTTPStatus again.

    SGLang's transport turns the status into a number, and SGLang writes an error into a stream only for an HTTPStatus.
    """
    reason = out["meta_info"]["finish_reason"]
    if isinstance(reason.get("status_code"), int):
        with suppress(ValueError):
            reason["status_code"] = HTTPStatus(reason["status_code"])


def reason_of(error: Exception) -> dict[str, Any]:
    """Return the finish reason for the client: only the error's type, because its text may quote other requests."""
    message = f"this request failed inside the engine ({type(error).__name__}) and was ended; the server goes on"
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}


def _place(error: BaseException) -> dict[str, Any] | None:
    """Return the local variables of SGLang's loop over the requests, or None if it raised before the first one."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == _HANDLER)
    at = next((frame.f_locals for frame in frames), {})
    return at if at.get("state") is not None else None


def _end_alone(manager: TokenizerManager, recv_obj: BatchStrOutput, at: dict[str, Any], error: Exception) -> None:
    """Answer the request at `at`, and keep only the later requests in `recv_obj`."""
    # SGLang's import order: hooks load before what they change
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.io_struct import AbortReq

    index, rid, waiting = at["i"], at["rid"], at["pending_notify"]
    recv_obj.rids[: index + 1] = [HEALTH_CHECK_RID_PREFIX] * (index + 1)  # SGLang skips ids that it does not know
    reason = recv_obj.finished_reasons[index]
    refused = reason is not None and reason["type"] == "abort"  # keep the scheduler's reason
    count(1, "output", error)
    logger.error("the output of request %s raised; the request ends with an error", rid, exc_info=error)
    if reason is None:
        manager.abort_request(rid)  # the scheduler still runs it
    if rid not in waiting:
        manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason if refused else reason_of(error)))
    for waiter in waiting.values():
        waiter.event.set()
