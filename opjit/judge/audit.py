"""Python's audit events: evidence of a candidate's attempts. No Python code can remove a hook."""

import sys
from pathlib import Path

from opjit.judge.verdict import VerdictReached

_REASONS = {
    "searches the process for values of other modules": "sys._getframe sys._current_frames"
    " gc.get_objects gc.get_referrers",
    "watches the code that measures it": "sys.settrace sys.setprofile sys.addaudithook",
    "starts processes": "os.fork os.forkpty",
}
_REFUSED = {event: reason for reason, events in _REASONS.items() for event in events.split()}


class Watch:
    """Refuses some functions of Python to the code of a folder, and remembers the first that it called.

    Only a direct call counts: many modules of Python call the same functions for honest programs.
    """

    def __init__(self, folder: Path) -> None:
        self.evidence = ""
        self._folder = str(folder)
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, args: tuple[object, ...]) -> None:
        reason = _REFUSED.get(event)
        if reason is None:
            return
        try:
            raise KeyError  # sys._getframe would raise an event
        except KeyError as error:
            here = error.__traceback__
        caller = None if here is None else here.tb_frame.f_back
        if caller is None:
            return
        file = caller.f_code.co_filename
        is_text = file[:1] == "<" and not file.startswith("<frozen")
        if not is_text and not file.startswith(self._folder):
            return
        self.evidence = self.evidence or f"{reason}: {event} in line {caller.f_lineno}"
        raise VerdictReached("cheat", self.evidence)
