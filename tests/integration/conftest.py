"""Fixtures that more than one file asks for."""

from tests.report_pages import axe, browser, compared, ranked, watched, whole

__all__ = ["axe", "browser", "compared", "ranked", "watched", "whole"]
