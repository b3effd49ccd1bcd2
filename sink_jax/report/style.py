"""The style of a report's page."""

STYLE = """\
:root { --ink: #1c1f23; --soft: #5b636d; --line: #d9dde2; --back: #ffffff; --shade: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a4acb6; --line: #3a4048; --back: #16191d; --shade: #20252b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--back); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 0 0 .4rem; }
header p, .note, figcaption, small { color: var(--soft); }
section { margin-top: 2.2rem; padding-top: 1.4rem; border-top: 1px solid var(--line); }
.overview { font-size: 1.1rem; font-weight: 600; }
.note, figcaption { font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .45rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { vertical-align: bottom; background: var(--shade); }
th:first-child, .left { text-align: left; }
tbody th { font-weight: 600; min-width: 10.5rem; }
small { display: block; font-weight: 400; }
ul { padding-left: 1.2rem; }
li { margin: .4rem 0; }
figure { margin: 1.4rem 0; }
figure .wide { background: #ffffff; border: 1px solid var(--line); border-radius: 6px; }
figure .single { overflow-x: auto; background: #ffffff; border: 1px solid var(--line);
  border-radius: 6px; }
img { display: block; width: 100%; min-width: 40rem; max-width: 62rem; margin: 0 auto; }
.single img { min-width: 24rem; max-width: 44rem; }
figcaption { margin-top: .4rem; }
details { margin-top: .8rem; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { font-weight: 600; }
dd { margin: 0; }
code { font: .85rem ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.settings { columns: 18rem; list-style: none; padding: 0; }
.settings li { margin: 0; }
h3 { font-size: 1.05rem; margin: 0 0 .3rem; }
h3 small { display: inline; }
nav ul { list-style: none; padding: 0; }
a { color: inherit; text-underline-offset: .15em; }
article { margin: 1.6rem 0; }
article p { margin: .3rem 0; }
td small { min-width: 6rem; overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: 0 .5rem; border-radius: 1rem; font-weight: 600;
  font-size: .85rem; border: 1px solid currentColor; }
.yes { color: #00735a; } .no { color: #b34700; } .maybe { color: #7a5c00; }
.open { color: var(--soft); }
@media (prefers-color-scheme: dark) {
  .yes { color: #3fd0a8; } .no { color: #ff9f5a; } .maybe { color: #e3bd4f; }
}
.strip { width: 15rem; height: 1.25rem; vertical-align: middle; color: var(--ink); }
.strip .axis { stroke: var(--line); } .strip .level { stroke: #b34700; stroke-width: 2; }
.strip .interval { stroke: var(--soft); stroke-width: 5; opacity: .45; }
.strip .seed { fill: var(--ink); } .strip .paper { fill: none; stroke: #2f6fd0; stroke-width: 1.5; }
.parts { list-style: none; padding-left: .6rem; font-size: .85rem; color: var(--soft); }
.counts { display: flex; flex-wrap: wrap; gap: .4rem 1rem; padding: 0; list-style: none; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; } }
"""
