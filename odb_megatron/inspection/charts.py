"""All charts of an inspection, in the order of its page.

Only gathers: data in `length_charts`, steps in `step_charts`.
"""

from __future__ import annotations

from odb_megatron.inspection.findings import Findings
from odb_megatron.inspection.length_charts import lengths_chart, tokens_chart
from odb_megatron.inspection.step_charts import balance_chart, micro_batch_chart, speed_chart
from odb_megatron.pages import Chart

__all__ = ["all_charts"]


def all_charts(findings: Findings) -> list[Chart]:
    """Return the charts in the order of the page."""
    charts = [
        lengths_chart(findings),
        tokens_chart(findings),
        micro_batch_chart(findings),
        speed_chart(findings),
    ]
    if findings.setting.dp > 1:
        charts.append(balance_chart(findings))
    return charts
