"""Alerts, checked and played by Prometheus' own tool."""

import shutil
import subprocess

from deploy.tools import ROOT

from caravan_testing.monitoring_files import RULES


def promtool(*arguments: str) -> str:
    """Run promtool and return what it prints; fail with that if it fails."""
    program = shutil.which("promtool")
    assert program is not None, "promtool is missing: apt-get install prometheus"
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_rules_are_well_formed() -> None:
    promtool("check", "rules", str(RULES))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(ROOT / "tests" / "deploy" / "rules_test.yaml"))
