"""Reads the text of /metrics."""

import re


def total(metrics: str, name: str, labels: str = "") -> float:
    """Return the sum of a metric over all label sets that contain ``labels``, such as 'how="swap"'; 0 without any."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*{re.escape(labels)}[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, values))
