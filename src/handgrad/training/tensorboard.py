"""TensorBoard events beside what a display shows. The package is optional."""

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import HandgradError
from .job import Display


def check_installed() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise HandgradError("--tensorboard needs the package tensorboard: pip install tensorboard")


class WithTensorBoard:
    """A display that writes every record as TensorBoard events as well."""

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
