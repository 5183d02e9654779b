"""Alerts, checked and played by Prometheus' own tool."""

from deploy.tools import ROOT, run_tool

from caravan_testing.monitoring_files import RULES


def test_rules_are_well_formed() -> None:
    run_tool("promtool", "check", "rules", RULES)


def test_alerts_fire_when_they_should() -> None:
    run_tool("promtool", "test", "rules", ROOT / "tests/deploy/rules_test.yaml")
