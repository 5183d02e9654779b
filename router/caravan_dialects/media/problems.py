"""What can be wrong with a file of a picture or a sound."""

from enum import Enum


class Reason(Enum):
    """Why a file was refused, as the metric of refused files has it."""

    ENCODING = "encoding"
    FORMAT = "format"
    SIZE = "size"
    BROKEN = "broken"
    TIME = "time"
    MEMORY = "memory"
    DECODER = "decoder"


class MediaFileError(Exception):
    """The file is refused. The message goes on after the name of the field that has it."""

    def __init__(self, reason: Reason, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
