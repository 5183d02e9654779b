"""The rules of decisions."""

from dataclasses import replace

from unit.router.http.rule_cases.case import DECISIONS, Case

from caravan_dialects.api.openai.decisions import rules
from caravan_testing.scripted_engine import CHAT_MODEL

CASES = [
    Case(
        rules.question_count_error,
        DECISIONS,
        {"questions": []},
        "questions",
        "`questions` must have 1 to 400 entries. Given: 0",
        model=CHAT_MODEL,
    ),
    Case(
        rules.prompt_tokens_error,
        DECISIONS,
        {
            "input": "x" * 700_000,
            "questions": [
                {"type": "choice", "instructions": "which?", "choices": [{"value": str(one)} for one in range(255)]}
            ]
            * 3,
        },
        "questions",
        "`questions` and `input` must make prompts of at most 16777216 tokens together. Given: 23166660",
        model=replace(CHAT_MODEL, max_sequence_tokens=1 << 20, max_tokenize_bytes=1 << 23),
    ),
    Case(
        rules.option_count_error,
        DECISIONS,
        {"questions": [{"type": "choice", "instructions": "which?", "choices": [{"value": "a"}]}]},
        "questions[0].choices",
        "`questions[0].choices` must have 2 to 255 entries. Given: 1",
        model=CHAT_MODEL,
    ),
    Case(
        rules.same_choice_error,
        DECISIONS,
        {"questions": [{"type": "choice", "instructions": "which?", "choices": [{"value": "a"}] * 2}]},
        "questions[0].choices[1].value",
        "`questions[0].choices[1].value` must differ from the values before it. Given: 'a'",
        model=CHAT_MODEL,
    ),
    Case(
        rules.blank_error,
        DECISIONS,
        {"questions": [{"type": "predicate", "instructions": " "}]},
        "questions[0].instructions",
        "`questions[0].instructions` must not be blank",
        model=CHAT_MODEL,
    ),
    Case(
        rules.format_version_error,
        DECISIONS,
        {"prompt_format_version": 2},
        "prompt_format_version",
        "`prompt_format_version` must be 1, the one that this server asks questions in. Given: 2",
        model=CHAT_MODEL,
    ),
]
