"""Reads the expressions of the alerts, the dashboard and the autoscaler in the Helm chart."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import promql_parser

FILES = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "caravan" / "files"
RULES, DASHBOARD, KEDA = FILES / "rules.yaml", FILES / "dashboard.json", FILES / "keda.yaml"

# Labels that the scraper adds to each series of a target.
TARGET_LABELS = frozenset({"namespace", "job", "instance"})


def rule_expressions() -> dict[str, str]:
    """Return the expression of each alert by its name."""
    document = msgspec.yaml.decode(RULES.read_bytes())
    return {rule["alert"]: rule["expr"] for group in document["groups"] for rule in group["rules"]}


def keda_queries(selector: str) -> dict[str, str]:
    """Return the query of each trigger by its name, with these label matchers."""
    queries: dict[str, str] = msgspec.yaml.decode(KEDA.read_bytes())
    return {name: query.replace("$selector", selector) for name, query in queries.items()}


def dashboard() -> dict[str, Any]:
    """Return the dashboard's JSON."""
    decoded: dict[str, Any] = msgspec.json.decode(DASHBOARD.read_bytes())
    return decoded


def dashboard_expressions(job: str = ".*", model: str = ".*") -> dict[str, str]:
    """Return each expression of the dashboard, by its panel's title and letter or its variable's name.

    ``job`` and ``model`` are the values of the variables, regular expressions.
    """
    found = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            values = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert values is not None, variable
            found[f"${variable['name']}"] = f"group by ({values[2]}) ({values[1].replace('$job', job)})"
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$job", job).replace("$model", model)
            found[f"{panel['title']} {target['refId']}"] = expression.replace("$__rate_interval", "1m")
    return found


def names_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric of an expression with the labels that it must have. Raises ValueError if it does not parse.

    These are the labels of its matchers, and of the aggregations and the vector matching around it.
    """
    yield from _names(promql_parser.parse(expression), frozenset())


def _names(node: promql_parser.Expr, around: frozenset[str]) -> Iterator[tuple[str, set[str]]]:
    match node:
        case promql_parser.VectorSelector():
            yield node.name or "", {matcher.name for matcher in node.matchers.matchers} | around
        case promql_parser.MatrixSelector():
            yield from _names(node.vector_selector, around)
        case promql_parser.AggregateExpr():
            yield from _names(node.expr, around | set(node.modifier.labels if node.modifier else ()))
        case promql_parser.Call():
            for argument in node.args:
                yield from _names(argument, around)
        case promql_parser.BinaryExpr():
            matching = node.modifier.matching if node.modifier else None
            for side in (node.lhs, node.rhs):
                yield from _names(side, around | set(matching.labels if matching else ()))
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _names(node.expr, around)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            raise AssertionError(f"unknown kind of expression: {node!r}")
