"""The last guard around code that writes answers: an unforeseen exception costs one answer and one line in the log."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from proxy.common.errors import Failure, GatewayError

logger = logging.getLogger("proxy.flow.guard")

UNWRITABLE = "the answer has a form that the gateway cannot write for its client"


def report(error: Exception) -> None:
    """Log where an unforeseen exception arose. Its text is left out, because it may quote the answer."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    logger.error("answer: cannot be written: %s at %s", type(error).__name__, place)


def unwritable(error: Exception) -> GatewayError:
    """Log an unforeseen exception; the error for the client."""
    report(error)
    return GatewayError(UNWRITABLE, code=f"decode_{Failure.BAD_ANSWER}", status=502)
