"""Write TensorBoard events. The package tensorboard is optional."""

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import HandgradError, option
from .job import Display


def check_installed() -> None:
    """Raise if tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise HandgradError(f"{option('tensorboard', True)} needs the package tensorboard: pip install tensorboard")


class WithTensorBoard:
    """A display that also writes every record as TensorBoard events."""

    def __init__(self, display: Display, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.display = display
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def show(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()
        self.display.show(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.display, name)
