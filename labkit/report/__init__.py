"""Reports: an executed notebook as one HTML file that opens with the network off."""

from .environment import environment
from .execute import CellProgress
from .export import export
from .run import ReportError, Result, run

__all__ = ["CellProgress", "ReportError", "Result", "environment", "export", "run"]
