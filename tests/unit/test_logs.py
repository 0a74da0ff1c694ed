"""The router's log: one line an event, as pairs or as JSON."""

import json
import logging

import pytest

from kvloom_server.logs import LOGGER, start_logging, stop_logging


@pytest.fixture
def written(tmp_path):
    """What was logged, in a format."""

    def write(log_format, log):
        path = tmp_path / f"{log_format}.log"
        handler = start_logging(level="info", log_format=log_format, path=path)
        try:
            log(logging.getLogger(f"{LOGGER}.router.turn"))
        finally:
            stop_logging(handler)
        return path.read_text().splitlines()

    return write


def test_pairs_stand_on_one_line(written):
    """Even if something in them does not."""
    (line,) = written("pairs", lambda log: log.info("event=%s why=%s", "x", "a\nb"))
    assert line.endswith("level=info logger=router.turn event=x why=a\\nb")
    assert line.startswith("time=")


def test_json_has_the_pairs_as_fields(written):
    """Counts and times are numbers, names are not, what is not known is not there."""
    text = "turn=%s conversation=%s ttft_ms=%s prompt_tokens=%s decode_ms=-"
    (line,) = written(
        "json", lambda log: log.info(text, "12345678", "0011", "175.2", 1592)
    )
    found = json.loads(line)
    assert (found["turn"], found["conversation"]) == ("12345678", "0011")
    assert (found["ttft_ms"], found["prompt_tokens"]) == (175.2, 1592)
    assert "decode_ms" not in found
    assert "message" not in found
    assert found["level"] == "info"


def test_a_sentence_stays_a_message(written):
    """Beside its pairs; and no pair takes the place of the line's own."""
    (line,) = written("json", lambda log: log.warning("level=fake event=x: do that"))
    found = json.loads(line)
    assert found["message"] == "level=fake event=x: do that"
    assert (found["level"], found["event"]) == ("warning", "x")


@pytest.mark.parametrize("log_format", ["pairs", "json"])
def test_an_exception_is_part_of_its_line(written, log_format):
    """So that a line is an event."""

    def log(logger):
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("event=died")

    (line,) = written(log_format, log)
    assert "ValueError: no" in line


def test_stopping_leaves_nothing_behind(written):
    """Neither a handler nor a level."""
    logger = logging.getLogger(LOGGER)
    before = (list(logger.handlers), logger.level, logger.propagate)
    written("json", lambda log: log.debug("event=x"))
    assert (list(logger.handlers), logger.level, logger.propagate) == before
