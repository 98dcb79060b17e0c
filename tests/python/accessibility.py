"""axe-core in a page of the browser, driven over its own protocol: the page's policy stays."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from browser import Browser

# Rules of WCAG 2.2, levels A and AA.
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]
RUN = (
    f"axe.run(document, {{ runOnly: {{ type: 'tag', values: {json.dumps(TAGS)} }},"
    " resultTypes: ['violations'] }).then(({ violations, passes }) => ({ passed: passes.length,"
    " violations: violations.map(({ id, help, nodes }) => `${id} (${help}): `"
    " + nodes.map((node) => node.target.join(' ') + ' ' + node.failureSummary).join('; ')) }))"
)


def axe_source() -> str:
    """The script. Nothing else of the package is used: that needs another browser driver."""
    found = importlib.util.find_spec("axe_playwright_python")
    assert found and found.submodule_search_locations, "axe is missing: run ./test python once"
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text()


def violations(browser: Browser) -> list[str]:
    """What in the page as it is now violates a rule of level A or AA."""
    if not browser.evaluate("'axe' in window"):
        browser.evaluate(axe_source() + "\n;0")
    result = browser.evaluate(RUN)
    # A page without anything to judge would have no violation either.
    assert result["passed"] >= 10, result
    return result["violations"]
