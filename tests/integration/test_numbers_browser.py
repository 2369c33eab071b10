"""The page script's numbers in headless Chromium."""

import pytest
from playwright.sync_api import Browser

from tests.spelled_numbers import SCRIPT, SPELL, spelled, values


@pytest.mark.browser
def test_chromium_spells_ten_thousand_values_alike(browser: Browser) -> None:
    given = values()
    page = browser.new_page()
    page.add_script_tag(content=SCRIPT.read_text(encoding="utf-8"))
    assert page.evaluate(SPELL, given) == spelled(given)
    page.close()
