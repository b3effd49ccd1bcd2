"""The style of a report's page."""

STYLE = """\
:root { --ink: #1c1f23; --soft: #5b636d; --line: #d9dde2; --back: #ffffff; --shade: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a4acb6; --line: #3a4048; --back: #141414; --shade: #20252b; }
  /* White becomes the colour of the page, and hues stay. */
  figure img { filter: invert(.92) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--back);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; overflow-wrap: anywhere; }
main { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 .4rem; padding-top: 1.4rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; }
p { margin: .5rem 0; }
h1 + p { font-size: 1.1rem; }
ul { padding-left: 1.2rem; }
li { margin: .3rem 0; }
a { color: inherit; text-underline-offset: .15em; }
code { font: .85rem ui-monospace, Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; background: var(--shade); padding: .6rem .8rem; border-radius: 6px; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; min-width: 100%;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; background: var(--shade); }
th:first-child { position: sticky; left: 0; background: var(--back); min-width: 8rem;
  max-width: 24rem; overflow-wrap: break-word; }
thead th:first-child { background: var(--shade); }
th em, td em { display: block; font-size: .85em; font-style: normal; font-weight: 400;
  color: var(--soft); overflow-wrap: anywhere; }
figure { margin: 1.2rem auto; }
figure img { width: 100%; }
figcaption { margin-top: .4rem; font-size: .9rem; color: var(--soft); }
summary { cursor: pointer; font-weight: 600; margin: .8rem 0; }
@media (max-width: 40rem) {
  table { font-size: .8rem; }
  th, td { padding: .35rem .3rem; }
  th:first-child { min-width: 6rem; max-width: 9rem; overflow-wrap: anywhere; }
}
"""
