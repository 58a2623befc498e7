"""`outrider dashboard`: what Grafana shows of the instruments, and Prometheus' rules for them."""

import argparse
import json
import sys
from pathlib import Path

from outrider.cluster.errors import ConfigError
from outrider.deploy.grafana import dashboard, query_variable
from outrider.deploy.panels import acceptance, glance, waste
from outrider.deploy.panels_serving import health, speed
from outrider.deploy.promql import RAY_PREFIX, Queries
from outrider.deploy.rules import RUNBOOKS, make_rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `outrider dashboard`."""
    parser.add_argument(
        "--prefix",
        choices=(RAY_PREFIX, ""),
        default=RAY_PREFIX,
        help='before every name: ray_ (the default) of Ray\'s metrics, "" of /metrics',
    )
    parser.add_argument(
        "--rules", action="store_true", help="the rules for Prometheus instead of the dashboard"
    )
    parser.add_argument(
        "--runbooks",
        type=_address,
        default=RUNBOOKS,
        metavar="URL",
        help="with --rules: where people read your docs/operating.md, for links in alerts",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here, not to stdout")


def _address(text: str) -> str:
    if not text or "{{" in text or "#" in text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a page (without #...)")
    return text


def run(options: argparse.Namespace) -> int:
    """Write the dashboard, or the rules."""
    prefix = options.prefix
    text = make_rules(prefix, options.runbooks) if options.rules else make_dashboard(prefix)
    if options.output is None:
        sys.stdout.write(text)
        return 0
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error.strerror}") from error
    return 0


def make_dashboard(prefix: str) -> str:
    """The dashboard as Grafana reads it, of names that begin so."""
    ask = Queries(prefix, "$__rate_interval", {"model": '=~"$model"', "draft": '=~"$draft"'})
    models = f"label_values({prefix}outrider_cache_rows, model)"
    drafts = f'label_values({prefix}outrider_draft_replicas{{model=~"$model"}}, draft)'
    variables = [
        query_variable("model", "Model", models),
        query_variable("draft", "Draft", drafts),
    ]
    rows = {
        "Speculation at a glance": glance(ask),
        "Acceptance": acceptance(ask),
        "Wasted work": waste(ask),
        "Speed": speed(ask),
        "Health": health(ask),
    }
    document = dashboard("outrider", "Outrider", variables, rows)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
