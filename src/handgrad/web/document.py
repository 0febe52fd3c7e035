"""A self-contained HTML document: its style inside, no script, and a policy under which it cannot make requests."""

from html import escape

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

STYLE = """
:root{color-scheme:light dark;--ink:#1c1917;--soft:#57534e;--page:#fdfcfa;--line:#d6d3d1;--card:#f5f3ef}
@media(prefers-color-scheme:dark){:root{--ink:#f0eeea;--soft:#b6b0a8;--page:#1a1918;--line:#454240;--card:#262422}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;max-width:820px;padding:24px}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.1rem;margin:32px 0 8px}
p.lead{color:var(--soft);margin:0 0 16px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.axis{stroke:var(--line)}.key{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.85rem;color:var(--soft)}
.key i{display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:middle}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px;margin:16px 0}
.facts div{background:var(--card);border-radius:8px;padding:10px 14px}.facts b{display:block;font-size:1.15rem}
.facts span{color:var(--soft);font-size:.85rem}
pre{background:var(--card);border-radius:8px;padding:12px;overflow-x:auto;white-space:pre-wrap;font-size:.85rem}
table{border-collapse:collapse;font-size:.9rem}td{padding:2px 16px 2px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{color:var(--soft);overflow-wrap:normal}
"""


def document(title: str, body: str, style: str = "") -> str:
    """The page; `body` is HTML, `style` more CSS."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}{style}</style></head><body>{body}</body></html>\n'
    )
