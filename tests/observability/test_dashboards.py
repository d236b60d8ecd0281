"""The dashboards and alerts against Prometheus itself: each query of each panel returns data, each alert is evaluated."""

import contextlib
import math
import re
import unittest

from tests.observability.scraped import PODS, REFIT, Scraped, boards, filled


def panels():
    """(dashboard, panel, expression) of each query."""
    for name, board in boards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield name, panel["title"], target["expr"]


class Dashboards(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        cls.scraped = Scraped(stack)

    def test_every_panel_shows_something(self):
        asked = list(panels())
        self.assertGreater(len(asked), 40)
        for board, title, expression in asked:
            expression = filled(expression)

            def is_shown(expression=expression):
                return any(not math.isnan(float(one["value"][1])) for one in self.scraped.query(expression))

            with self.subTest(f"{board}: {title}"):
                self.assertNotIn("$", expression)
                self.scraped.wait(f"`{expression}` returns data", is_shown)

    def test_every_variable_has_values(self):
        for board in boards().values():
            for variable in board["templating"]["list"]:
                if variable["type"] == "query":
                    selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()
                    found = self.scraped.ask(f"label/{label}/values", **{"match[]": filled(selector)})
                    self.assertIn(REFIT[label], found, variable["name"])

    def test_every_alert_is_evaluated_and_names_series_that_there_are(self):
        (group,) = self.scraped.ask("rules")["groups"]
        self.assertGreater(len(group["rules"]), 20)
        for rule in group["rules"]:
            self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""), rule["name"])
            selectors = re.findall(r"\b(weightrefit_\w+|up)(\{[^}]*\})?", rule["query"])
            self.assertTrue(selectors, rule["name"])
            for name, matchers in selectors:
                labels = set(re.findall(r"(\w+)=~?\"", matchers))
                series = self.scraped.ask("series", **{"match[]": name})
                self.assertTrue(series, f"{rule['name']}: there is no {name}")
                self.assertTrue(any(labels <= set(one) for one in series), f"{rule['name']}: {name} lacks {labels}")

    def test_agents_of_a_healthy_run_say_so(self):
        for expression, least, most in (
            ("sum(weightrefit_agent_coordinator_connected)", len(PODS), len(PODS)),
            ("min(weightrefit_agent_certificate_expiry_timestamp_seconds) - time()", 20 * 3600, 24 * 3600),
            ("max(weightrefit_agent_rounds_aborted_in_a_row)", 0, 0),
            ('min(weightrefit_agent_committed_step{side="inference"})', 1, math.inf),
            ('max(weightrefit_agent_committed_step{side="training"})', -1, -1),
            ('max(weightrefit_agent_published_step{side="inference"})', -1, -1),
        ):
            (value,) = (float(one["value"][1]) for one in self.scraped.query(expression))
            self.assertTrue(least <= value <= most, f"{expression} is {value}")

    def test_nothing_is_alarming_in_a_healthy_run(self):
        alerts = self.scraped.ask("alerts")["alerts"]
        self.assertEqual([alert["labels"] for alert in alerts if alert["state"] == "firing"], [])


if __name__ == "__main__":
    unittest.main()
