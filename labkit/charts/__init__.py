"""Charts: records in, plotly figure out.

`Live` draws while the ranks train; the functions draw a `labkit.train.History` or plain arrays afterwards.
"""

from .elastic import world_size_over_time
from .live import Live
from .measured import bars, lines
from .methods import over_time, pace, staleness
from .records import Run
from .theme import COLOURS, PARTS, TEMPLATE
from .training import compare, loss_per_rank, step_parts, step_time_per_rank, training

__all__ = [
    "COLOURS",
    "PARTS",
    "TEMPLATE",
    "Live",
    "Run",
    "bars",
    "compare",
    "lines",
    "loss_per_rank",
    "over_time",
    "pace",
    "staleness",
    "step_parts",
    "step_time_per_rank",
    "training",
    "world_size_over_time",
]
