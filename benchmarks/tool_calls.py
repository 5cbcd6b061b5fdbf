"""Agent transcripts with JSON tool definitions, calls and results, made up from our own templates.

Everything is invented and seeded: `transcripts(n)` gives the same text on every machine. Episodes differ in tools,
wording, the layout of the JSON, and in whether a call fails, is repeated with other arguments or has a companion.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

CITIES = (
    "Lisbon Oslo Nairobi Kyoto Quito Tallinn Leeds Porto Bergen Osaka Lyon Gdansk Tampere Valencia Recife Hobart "
    "Galway Bremen Malmo Turin Dakar Izmir Cusco Split"
).split()
PEOPLE = (
    "Amara Bjorn Chiara Dmitri Elif Farah Goran Hana Ines Jonas Keiko Liam Marta Nikhil Olga Priya Quentin Rosa Sven "
    "Tomas Uma Viktor Wanda Yusuf"
).split()
GOODS = (
    "desk lamp/cordless drill/rain jacket/espresso grinder/tent pegs/bicycle pump/wool blanket/label printer/"
    "standing desk/soldering iron/cast iron pan/field notebook/head torch/USB hub/garden shears/water filter"
).split("/")
TOPICS = (
    "flaky integration tests/invoice rounding/onboarding checklist/backup retention/holiday rota/search relevance/"
    "login rate limits/warehouse labels/battery returns/translation glossary/office move/certificate renewal"
).split("/")
TABLES = "orders shipments sensors invoices visits tickets batches meters".split()
SERVICES = "billing-api search-index image-resizer auth-gateway mail-relay report-worker".split()


@dataclass(frozen=True)
class Call:
    """One use of a tool: what the user says, the arguments, the result and what the assistant makes of it."""

    ask: str
    args: dict
    result: dict
    answer: str


@dataclass(frozen=True)
class Tool:
    """A definition as an API would list it, and a maker of uses."""

    name: str
    description: str
    parameters: dict[str, dict]
    required: tuple[str, ...]
    use: Callable[[random.Random], Call]

    def definition(self) -> dict:
        """The JSON schema form."""
        schema = {"type": "object", "properties": self.parameters, "required": list(self.required)}
        return {"name": self.name, "description": self.description, "parameters": schema}


def day(r: random.Random) -> str:
    """A date as ISO 8601."""
    return f"20{r.randint(23, 27)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"


def clock(r: random.Random) -> str:
    """A time on a quarter of an hour."""
    return f"{r.randint(6, 21):02d}:{r.choice(('00', '15', '30', '45'))}"


def ident(r: random.Random, prefix: str) -> str:
    """An identifier such as a database would give."""
    return prefix + "".join(r.choice("0123456789abcdefghjkmnpqrstvwxyz") for _ in range(8))


def text(description: str, *options: str) -> dict:
    """A string parameter, possibly with the allowed values."""
    return {"type": "string", "description": description} | ({"enum": list(options)} if options else {})


def number(description: str, low: int, high: int) -> dict:
    """A bounded integer parameter."""
    return {"type": "integer", "description": description, "minimum": low, "maximum": high}


def forecast(r: random.Random) -> Call:
    """Weather of one day."""
    city, when, low = r.choice(CITIES), day(r), r.randint(-8, 17)
    high, wind, rain = low + r.randint(3, 11), r.randint(4, 62), r.randint(0, 19)
    sky = r.choice(("clear", "overcast", "light rain", "scattered showers", "fog until noon", "sleet"))
    ask = r.choice((f"What will the weather be like in {city} on {when}?", f"Do I need an umbrella in {city}, {when}?"))
    result = {"city": city, "date": when, "sky": sky, "temp_c": {"low": low, "high": high}, "wind_kmh": wind}
    say = f"Expect {sky} in {city} that day, between {low} and {high} degrees, with wind around {wind} km/h."
    return Call(ask, {"city": city, "date": when}, result | {"rain_mm": rain}, say)


def trains(r: random.Random) -> Call:
    """Connections between two towns."""
    a, b = r.sample(CITIES, 2)
    when, seats = day(r), r.randint(1, 4)
    options = [
        {
            "depart": clock(r),
            "minutes": r.randint(48, 412),
            "changes": r.randint(0, 2),
            "price": r.randint(19, 140) + r.choice((0.0, 0.5, 0.9)),
        }
        for _ in range(r.randint(2, 3))
    ]
    best = min(options, key=lambda o: o["price"])
    ask = f"{seats} of us want to go from {a} to {b} on {when}, as cheaply as possible."
    say = f"The {best['depart']} is cheapest at {best['price']:.2f} each, {best['minutes']} minutes on the way."
    args = {"origin": a, "destination": b, "date": when, "passengers": seats}
    return Call(ask, args, {"connections": options, "currency": "EUR"}, say)


def meeting(r: random.Random) -> Call:
    """A calendar entry."""
    who, topic, when, start = r.sample(PEOPLE, r.randint(2, 4)), r.choice(TOPICS), day(r), clock(r)
    length = r.choice((15, 25, 30, 45, 60, 90))
    ask = f"Put {length} minutes about {topic} into the calendar on {when} at {start}, with {' and '.join(who)}."
    args = {"title": topic.capitalize(), "start": f"{when}T{start}:00", "minutes": length}
    args |= {"attendees": [f"{w.lower()}@example.org" for w in who]}
    room = f"{r.choice('ABCD')}{r.randint(101, 432)}"
    result = {"event_id": ident(r, "ev_"), "room": room, "conflicts": r.choice(([], [who[0]]))}
    say = f"Booked in room {room}." + (f" {who[0]} has another entry then." if result["conflicts"] else "")
    return Call(ask, args, result, say)


def query(r: random.Random) -> Call:
    """A read-only database query."""
    table, since, limit = r.choice(TABLES), day(r), r.choice((3, 4, 5))
    column = r.choice(("region", "customer", "status", "site", "operator"))
    sql = (
        f"SELECT {column}, COUNT(*) AS n, ROUND(AVG(amount), 2) AS mean FROM {table} "
        f"WHERE created_at >= '{since}' GROUP BY {column} ORDER BY n DESC LIMIT {limit}"
    )
    rows = [[r.choice(CITIES).lower(), r.randint(3, 4800), round(r.uniform(2, 900), 2)] for _ in range(limit)]
    rows.sort(key=lambda row: -row[1])
    ask = f"Which {column} had most {table} since {since}, and what was the mean amount?"
    say = f"{rows[0][0].capitalize()} leads with {rows[0][1]} {table}; the mean amount there is {rows[0][2]}."
    result = {"columns": [column, "n", "mean"], "rows": rows, "elapsed_ms": r.randint(2, 930)}
    return Call(ask, {"sql": sql, "read_only": True}, result, say)


def convert(r: random.Random) -> Call:
    """Currency conversion."""
    a, b = r.sample(("EUR", "USD", "JPY", "NOK", "KES", "BRL", "GBP", "PLN", "INR", "CAD"), 2)
    amount, rate = r.choice((12.5, 80, 199, 340, 1250, 48000)), round(r.uniform(0.05, 14), 4)
    ask = r.choice((f"How much is {amount} {a} in {b}?", f"I have {amount} {a} left. What would that be in {b}?"))
    result = {"rate": rate, "converted": round(amount * rate, 2), "as_of": day(r)}
    say = f"{amount} {a} is {amount * rate:.2f} {b} at a rate of {rate}."
    return Call(ask, {"amount": amount, "from": a, "to": b}, result, say)


def stock(r: random.Random) -> Call:
    """Items in a shop."""
    item, budget = r.choice(GOODS), r.randint(20, 260)
    hits = [
        {
            "sku": ident(r, "").upper(),
            "name": f"{r.choice(('Fjord', 'Alba', 'Kestrel', 'Nimbus', 'Terra'))} {item}",
            "price": round(r.uniform(6, budget), 2),
            "in_stock": r.randint(0, 40),
            "rating": round(r.uniform(2.8, 5), 1),
        }
        for _ in range(r.randint(2, 3))
    ]
    best = max(hits, key=lambda h: h["rating"])
    ask = f"I am looking for a {item} under {budget} euros that people are happy with."
    say = f"The {best['name']} is rated {best['rating']} and costs {best['price']}; {best['in_stock']} are in stock."
    return Call(ask, {"query": item, "max_price": budget, "sort": "rating"}, {"hits": hits}, say)


def logs(r: random.Random) -> Call:
    """Lines of a service's log."""
    service, level, minutes = r.choice(SERVICES), r.choice(("error", "warning")), r.choice((10, 30, 60, 240))
    causes = (
        "upstream timed out after 3000 ms",
        "connection pool exhausted (64/64)",
        "invalid signature on token",
        "disk usage above 91 percent",
        "retry budget spent, giving up",
        "schema version 14 expected, got 13",
    )
    cause = r.choice(causes)
    lines = [
        f"{day(r)}T{clock(r)}:{r.randint(10, 59)}Z {service}[{r.randint(200, 9999)}] {level.upper()} "
        f"{cause if i == 0 else r.choice(causes)} trace={ident(r, '')}"
        for i in range(r.randint(2, 4))
    ]
    ask = f"{service} has been acting up. Anything in the {level} log of the last {minutes} minutes?"
    say = f"Yes, {len(lines)} lines. The first complaint is: {cause}."
    args = {"service": service, "level": level, "since_minutes": minutes}
    return Call(ask, args, {"lines": lines, "truncated": r.random() < 0.3}, say)


def thermostat(r: random.Random) -> Call:
    """A device at home."""
    room, target = r.choice(("study", "kitchen", "nursery", "workshop", "attic")), r.randint(15, 23)
    now = round(target + r.uniform(-5, 5), 1)
    until = clock(r)
    ask = r.choice(
        (f"It is uncomfortable in the {room}; make it {target} degrees.", f"{room.capitalize()} to {target}.")
    )
    args = {"room": room, "target_c": target, "until": until}
    result = {"room": room, "measured_c": now, "mode": "heat" if now < target else "cool", "valve": r.randint(5, 95)}
    return Call(ask, args, result, f"The {room} is at {now} now and goes to {target}, until {until}.")


def ticket(r: random.Random) -> Call:
    """An issue in a tracker."""
    topic, who, priority = r.choice(TOPICS), r.choice(PEOPLE), r.choice(("low", "normal", "high"))
    ask = f"Open a {priority} priority ticket about {topic} and give it to {who}."
    args = {"title": f"Look into {topic}", "assignee": who.lower(), "priority": priority}
    args |= {"labels": r.sample(("ops", "docs", "bug", "customer", "cleanup", "security"), 2)}
    key = f"{r.choice(('OPS', 'WEB', 'DATA'))}-{r.randint(100, 9999)}"
    result = {"key": key, "url": f"https://tracker.example.org/{key}", "watchers": r.randint(0, 7)}
    return Call(ask, args, result, f"Done: {key}, assigned to {who}.")


def files(r: random.Random) -> Call:
    """A search through a source tree."""
    name = r.choice(("parse_header", "RetryPolicy", "load_config", "TokenBucket", "flush_queue", "render_row"))
    folder = r.choice(("src", "lib/core", "services/ingest", "tools", "packages/client"))
    hits = [
        {
            "path": f"{folder}/{r.choice(('io', 'net', 'util', 'model', 'cli'))}_{r.choice(TABLES)}.py",
            "line": r.randint(3, 812),
            "text": r.choice((f"def {name}(self, value):", f"result = {name}(data)", f"from .base import {name}")),
        }
        for _ in range(r.randint(2, 4))
    ]
    ask = f"Where is {name} used under {folder}?"
    say = f"In {len(hits)} places, the first is line {hits[0]['line']} of {hits[0]['path']}."
    return Call(ask, {"pattern": rf"\b{name}\b", "path": folder, "glob": "*.py"}, {"matches": hits}, say)


def parcel(r: random.Random) -> Call:
    """Where a parcel is."""
    code = "".join(r.choice("0123456789") for _ in range(12))
    stops = [
        {"at": f"{day(r)}T{clock(r)}", "place": city, "event": event}
        for city, event in zip(r.sample(CITIES, 3), ("accepted", "sorted", "out for delivery"), strict=True)
    ][: r.randint(1, 3)]
    ask = r.choice((f"Where is parcel {code}?", f"My parcel {code} should be here by now. Can you look it up?"))
    result = {"tracking": code, "events": stops, "weight_kg": round(r.uniform(0.2, 28), 2)}
    return Call(ask, {"tracking": code}, result, f"Last seen in {stops[-1]['place']}: {stops[-1]['event']}.")


def nutrition(r: random.Random) -> Call:
    """What is in a dish."""
    dish, grams = r.choice(("lentil soup", "rye bread", "miso salmon", "shakshuka", "pierogi")), r.randint(80, 420)
    values = {"kcal": round(grams * r.uniform(0.6, 3.1)), "protein_g": round(grams * r.uniform(0.02, 0.21), 1)}
    values |= {"fat_g": round(grams * r.uniform(0.01, 0.2), 1), "salt_g": round(grams * r.uniform(0.002, 0.02), 2)}
    ask = f"How many calories are in {grams} grams of {dish}? And how much protein?"
    say = f"About {values['kcal']} kilocalories and {values['protein_g']} grams of protein."
    return Call(ask, {"food": dish, "grams": grams}, {"per_portion": values, "source": "kitchen table 7"}, say)


ISO = text("Date as YYYY-MM-DD")
TOOLS = (
    Tool(
        "get_forecast", "Weather forecast of one day.", {"city": text("Town"), "date": ISO}, ("city", "date"), forecast
    ),
    Tool(
        "search_trains",
        "Find rail connections with prices per passenger.",
        {
            "origin": text("Station to leave from"),
            "destination": text("Station to reach"),
            "date": ISO,
            "passengers": number("Travellers", 1, 9),
        },
        ("origin", "destination", "date"),
        trains,
    ),
    Tool(
        "create_event",
        "Add an entry to the shared calendar and invite people.",
        {
            "title": text("Subject line"),
            "start": text("Local start as ISO 8601"),
            "minutes": number("Length", 5, 480),
            "attendees": {"type": "array", "items": {"type": "string", "format": "email"}},
        },
        ("title", "start", "minutes"),
        meeting,
    ),
    Tool(
        "run_sql",
        "Run one statement against the reporting replica. Rows come back as arrays in column order.",
        {"sql": text("A single SELECT"), "read_only": {"type": "boolean", "default": True}},
        ("sql",),
        query,
    ),
    Tool(
        "convert_currency",
        "Convert an amount at the mid-market rate of the day.",
        {"amount": {"type": "number"}, "from": text("ISO 4217 code"), "to": text("ISO 4217 code")},
        ("amount", "from", "to"),
        convert,
    ),
    Tool(
        "search_products",
        "Search the catalogue.",
        {
            "query": text("Words to look for"),
            "max_price": {"type": "number", "exclusiveMinimum": 0},
            "sort": text("Order of the hits", "price", "rating", "newest"),
        },
        ("query",),
        stock,
    ),
    Tool(
        "tail_logs",
        "Recent lines of one service's log, newest last.",
        {
            "service": text("Deployment name"),
            "level": text("Lowest severity to return", "debug", "info", "warning", "error"),
            "since_minutes": number("How far back", 1, 1440),
        },
        ("service",),
        logs,
    ),
    Tool(
        "set_thermostat",
        "Change the target temperature of a room.",
        {"room": text("Room as named in the app"), "target_c": number("Celsius", 5, 30), "until": text("HH:MM")},
        ("room", "target_c"),
        thermostat,
    ),
    Tool(
        "open_ticket",
        "Create a ticket and return its key.",
        {
            "title": text("One line"),
            "assignee": text("User name"),
            "priority": text("Urgency", "low", "normal", "high"),
            "labels": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        },
        ("title",),
        ticket,
    ),
    Tool(
        "grep",
        "Regular expression search in the working copy.",
        {"pattern": text("Python syntax"), "path": text("Folder"), "glob": text("File name filter")},
        ("pattern",),
        files,
    ),
    Tool("track_parcel", "Events of a parcel.", {"tracking": text("Twelve digits")}, ("tracking",), parcel),
    Tool(
        "food_facts",
        "Nutrients of a portion of food.",
        {"food": text("Name of the dish"), "grams": number("Weight of the portion", 1, 5000)},
        ("food",),
        nutrition,
    ),
)
FAILURES = (
    {"error": "rate_limited", "retry_after_s": 2},
    {"error": "timeout", "detail": "backend did not answer in time"},
    {"error": "unavailable", "detail": "maintenance window, try again"},
)


def tagged(r: random.Random, tools: list[Tool], calls: list[tuple[Tool, Call]]) -> str:
    """Chat with the calls between tags, definitions one a line."""
    out = ["system: You are a helpful assistant. Call a tool when it helps, otherwise answer directly.", "<tools>"]
    out += [json.dumps(tool.definition()) for tool in tools] + ["</tools>"]
    for tool, call in calls:
        out += [f"user: {call.ask}", "assistant: <tool_call>"]
        out += [json.dumps({"name": tool.name, "arguments": call.args}), "</tool_call>"]
        if r.random() < 0.25:
            out += [f"tool: {json.dumps(r.choice(FAILURES))}", "assistant: That failed, I will try once more."]
            out += ["<tool_call>", json.dumps({"name": tool.name, "arguments": call.args}), "</tool_call>"]
        out += [f"tool: {json.dumps(call.result)}", f"assistant: {call.answer}"]
    return "\n".join(out)


def messages(r: random.Random, tools: list[Tool], calls: list[tuple[Tool, Call]]) -> str:
    """A request body as it goes over the wire, indented."""
    turns: list[dict] = []
    for tool, call in calls:
        key = ident(r, "call_")
        function = {"name": tool.name, "arguments": json.dumps(call.args)}
        turns += [
            {"role": "user", "content": call.ask},
            {"role": "assistant", "tool_calls": [{"id": key, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": key, "content": json.dumps(call.result)},
            {"role": "assistant", "content": call.answer},
        ]
    body = {"model": "assistant-small", "temperature": r.choice((0, 0.2, 0.7)), "messages": turns}
    return json.dumps(body | {"tools": [{"type": "function", "function": t.definition()} for t in tools]}, indent=1)


def parallel(r: random.Random, tools: list[Tool], calls: list[tuple[Tool, Call]]) -> str:
    """One request that needs several calls at once, as a log of JSON lines."""
    stamp = f"{day(r)}T{clock(r)}"
    rows: list[dict] = [{"t": stamp, "event": "tools", "available": [t.definition() for t in tools]}]
    rows += [{"event": "user", "text": " Also: ".join(call.ask for _, call in calls)}]
    rows += [{"event": "call", "n": i, "tool": t.name, "args": c.args} for i, (t, c) in enumerate(calls)]
    order = r.sample(range(len(calls)), len(calls))
    rows += [{"event": "result", "n": i, "ms": r.randint(8, 2400), "output": calls[i][1].result} for i in order]
    rows += [{"event": "assistant", "text": " ".join(call.answer for _, call in calls)}]
    return "\n".join(json.dumps(row, separators=(",", ":")) for row in rows)


def transcripts(chars: int, seed: int = 2718) -> str:
    """Episodes up to about `chars` characters, each with other tools and values."""
    r = random.Random(seed)
    episodes: list[str] = []
    while sum(map(len, episodes)) < chars:
        tools = r.sample(TOOLS, r.randint(2, 3))
        calls = [(tool, tool.use(r)) for tool in r.sample(tools, r.randint(1, 2)) + r.choices(tools, k=1)]
        episodes.append((tagged, messages, parallel)[len(episodes) % 3](r, tools, calls))
    return "\n\n".join(episodes) + "\n"
