"""The status page as a jinja2 template: one file, no script, nothing loaded from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --panel: #f4f5f7; --ink: #16181d;
  --quiet: #565c67; --line: #d9dce2; --bar: #2563c9; --track: #e0e3e9;
  --alarm: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #121417; --panel: #1b1e23; --ink: #eceef1; --quiet: #a3aab6;
    --line: #30353d; --bar: #6ea1f5; --track: #2b3038; --alarm: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.45 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
header { display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: baseline;
  justify-content: space-between; }
h1, p, caption, tbody th { overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.1rem; }
h2 { margin: 0 0 .5rem; font-size: 1rem; }
p { margin: 0; }
.quiet, th { color: var(--quiet); font-weight: 400; }
.alarm { margin-top: 1rem; color: var(--alarm); font-weight: 700; }
.hero { margin: 1rem 0; padding: 1.25rem; background: var(--panel); border-radius: .75rem; }
.rate { font-size: clamp(3.5rem, 16vw, 7rem); font-weight: 700; line-height: 1.1;
  letter-spacing: -.03em; }
.words { font-size: clamp(2rem, 9vw, 3.5rem); }
.bar { display: block; height: .7rem; min-width: 3rem; border-radius: .35rem;
  background: var(--track); overflow: hidden; }
.bar span { display: block; height: 100%; background: var(--bar); }
.hero .bar { height: 1rem; margin: .6rem 0; border-radius: .5rem; }
.tiles, .panels { display: grid; gap: 1rem; margin: 0 0 1rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(min(100%, 14rem), 1fr)); }
.panels { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.panels > section, .tiles > div { min-width: 0; padding: 1rem; border: 1px solid var(--line);
  border-radius: .75rem; }
.tiles { padding: 0; }
.tiles dt { color: var(--quiet); }
.tiles dd { margin: 0; }
.tiles .figure { font-size: 2rem; font-weight: 650; line-height: 1.2; }
table { width: 100%; border-collapse: collapse; }
caption { padding: .6rem 0 .2rem; color: var(--ink); text-align: left; }
td, thead th { white-space: nowrap; }
th, td { padding: .3rem 0 .3rem .75rem; text-align: right; vertical-align: baseline; }
th:first-child { padding-left: 0; text-align: left; }
tr + tr > *, thead + tbody > tr:first-child > * { border-top: 1px solid var(--line); }
tbody th { color: var(--ink); }
td.chart { width: 45%; }
td.chart + td { width: 5rem; }
.charts :is(th, td) { vertical-align: middle; }
th .quiet { display: block; font-size: .875rem; }
footer { color: var(--quiet); font-size: .875rem; }
a { color: inherit; }
@media (max-width: 30rem) {
  .tiles { gap: .5rem; }
  .tiles > div { display: flex; flex-wrap: wrap; align-items: baseline; padding: .5rem 1rem;
    justify-content: space-between; }
  .tiles .figure { margin-left: auto; font-size: 1.5rem; }
  .tiles .quiet { width: 100%; text-align: right; }
  td.chart { width: 30%; }
}
"""

LAYOUT = """
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{{ refresh_s }}">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
{% block body %}{% endblock %}
</body>
</html>
"""

PAGE = """
{%- extends "layout" -%}
{%- macro bar(share) -%}
<span class="bar" aria-hidden="true">
<span style="width: {{ '%.1f' % (100 * share) }}%"></span></span>
{%- endmacro -%}
{%- macro figures(title, rows) -%}
<section>
<h2>{{ title }}</h2>
<table>
<thead><tr><th scope="col"></th>
{%- for glance in glances %}<th scope="col">{{ glance | window }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for name, say in rows %}
<tr><th scope="row">{{ name }}</th>
{%- for glance in glances %}<td>{{ say(glance) }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody>
</table>
</section>
{%- endmacro -%}
{% block body -%}
<header>
<h1>{{ model }}</h1>
<p class="quiet">Outrider: {{ load }}</p>
</header>
<main>
{%- if not total.is_ready %}
<p class="alarm" role="status">{{ lost | capitalize }}.</p>
{%- endif %}
<section class="hero" aria-labelledby="rate">
<h2 id="rate">Acceptance rate</h2>
{% if shown.is_idle -%}
<p class="rate words">no traffic yet</p>
{%- elif shown.acceptance_rate is none -%}
<p class="rate words">nothing drafted</p>
<p class="quiet">{{ shown | window }}</p>
{%- else -%}
<p class="rate">{{ shown.acceptance_rate | percent }}</p>
{{ bar(shown.acceptance_rate) }}
<p>of drafted tokens accepted, {{ shown | window }}
{%- if shown is not sameas total %}
<span class="quiet">({{ total.acceptance_rate | percent }} since start)</span>{% endif %}
{%- if recent and recent.is_idle %}
<span class="quiet">(no traffic in the {{ recent | window }})</span>{% endif %}</p>
{%- endif %}
</section>
<dl class="tiles">
{%- for name, say in tiles %}
<div><dt>{{ name }}</dt><dd class="figure">{{ say(shown) }}</dd>
{%- if shown is not sameas total and say(total) != nothing %}
<dd class="quiet">{{ say(total) }} since start</dd>{% endif %}
</div>
{%- endfor %}
</dl>
<div class="panels">
<section>
<h2>Acceptance by draft</h2>
{% if shown.drafts -%}
<p class="quiet">Accepted of the drafted tokens, {{ shown | window }}</p>
<table class="charts">
<tbody>
{%- for draft in shown.drafts %}
<tr><th scope="row">{{ draft.name }} <span class="quiet">{{ draft | about }}</span></th>
<td class="chart">{{ bar(draft.acceptance_rate or 0) }}</td>
<td>{{ draft.acceptance_rate | percent }}</td></tr>
{%- endfor %}
</tbody>
</table>
{%- else -%}
<p class="quiet">no drafts: plain decoding</p>
{%- endif %}
</section>
<section>
<h2>Acceptance by position</h2>
<p class="quiet">Blocks whose token at that position was accepted, {{ shown | window }}</p>
{%- for draft in shown.drafts if draft.acceptance_by_position %}
<table class="charts">
<caption>{{ draft.name }}</caption>
<tbody>
{%- for share in draft.acceptance_by_position %}
<tr><th scope="row">token {{ loop.index }}</th>
<td class="chart">{{ bar(share) }}</td><td>{{ share | percent }}</td></tr>
{%- endfor %}
</tbody>
</table>
{%- else %}
<p class="quiet">nothing drafted</p>
{%- endfor %}
</section>
{{ figures("Speed", speed) }}
{{ figures("Wasted work", waste) }}
{{ figures("Trouble", trouble) }}
<section>
<h2>Now</h2>
<table>
<tbody>
{%- for name, say in now %}
<tr><th scope="row">{{ name }}</th><td>{{ say(total) }}</td></tr>
{%- endfor %}
</tbody>
</table>
</section>
</div>
</main>
<footer>Refreshed every {{ refresh_s }} s. All counts: <a href="metrics">metrics</a></footer>
{%- endblock %}
"""

TROUBLE = """
{%- extends "layout" -%}
{% block body -%}
<main class="hero">
<h1>Not ready</h1>
<p>{{ sentence }}</p>
<p class="quiet">This page tries again every {{ refresh_s }} s.</p>
</main>
{%- endblock %}
"""
