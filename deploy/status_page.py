"""The status page: a glance as HTML, for people without Grafana. Every name in it is escaped."""

from functools import cache

from jinja2 import DictLoader, Environment, StrictUndefined

from outrider.deploy import figures, status_template
from outrider.deploy.glance import SPACING_S, Glance, latest

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
}


def render_status(model: str, total: Glance, recent: Glance | None) -> str:
    """The page: what happened lately where there was traffic, else since the start."""
    shown = latest(total, recent)
    speed = figures.SPEED[0 if shown.tokens_per_s is not None else 1]
    rate = figures.percent(shown.acceptance_rate)
    return _render(
        "page",
        title=f"{model}: {'no traffic yet' if total.is_idle else f'{rate} accepted'} - Outrider",
        model=model,
        load=", ".join(f"{say(total)} {name}" for name, say in figures.LOAD[:2]),
        lost=figures.LOST,
        shown=shown,
        total=total,
        recent=recent,
        glances=[total] if recent is None else [recent, total],
        tiles=[figures.SPECULATION[1], speed, figures.SPECULATION[2]],
        speed=figures.SPEED,
        waste=figures.WASTE,
        trouble=figures.TROUBLE,
        now=figures.LOAD,
        nothing=figures.NOTHING,
    )


def render_trouble(sentence: str) -> str:
    """The page of a server that cannot say anything yet."""
    return _render("trouble", title="Not ready - Outrider", sentence=sentence)


def _render(template: str, **values: object) -> str:
    page = _environment().get_template(template)
    return page.render(values, style=status_template.STYLE, refresh_s=int(SPACING_S)).lstrip()


@cache
def _environment() -> Environment:
    pages = {
        "layout": status_template.LAYOUT,
        "page": status_template.PAGE,
        "trouble": status_template.TROUBLE,
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=DictLoader(pages))
    filters = (figures.percent, figures.decimal, figures.window, figures.about)
    environment.filters.update({say.__name__: say for say in filters})
    return environment
