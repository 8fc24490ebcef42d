"""The wording of the training chats: what is asked about a scene, and what a good answer says.
 Owns sentences only; what a scene holds is `foreglance.bench.scenes`' business, token ids are `prepare`'s. A
chat is a list of messages in the usual `{"role", "content"}` form; an image part carries the seed of its
scene.

Two kinds of words are kept strictly apart. Content words (colours, shapes, sizes, counts, digits, written
words, positions) follow from the scene alone and have one spelling each. All other choices, written `{so|so}`
in the templates, are drawn evenly and independently of the scene: about a quarter of the tokens of a caption.
They are what a draft cannot know, so the acceptance of a draft trained on this text looks like that of a
draft on real text.
"""

import random
import re
import string
import tomllib
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from foreglance.bench.scenes import (
    COLOURS,
    COUNTS,
    HELD_OUT_SEED,
    POSITIONS,
    SHAPES,
    WORDS,
    Item,
    Scene,
    render,
    sample_scene,
    scene_from_seed,
)

Message = dict
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_CHOICE = re.compile(r"\{([^{}]*)\}")


def say(rng: random.Random, template: str, **slots: str) -> str:
    """Draws one of every `{a|b|c}` and fills every `$slot`; the first letter becomes a capital."""
    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = string.Template(text).substitute(slots)
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- naming things


def thing(item: Item) -> str:
    """`small red circle`, `number 47` or `word FOX`."""
    return f"{item.size} {item.colour} {item.shape}" if item.kind == "shape" else f"{item.kind} {item.text}"


def a_thing(item: Item) -> str:
    return f"a {thing(item)}" if item.kind == "shape" else f"the {thing(item)} in {item.colour}"


def short_thing(item: Item) -> str:
    """Without its size: `an orange circle`."""
    if item.kind != "shape":
        return f"the {thing(item)}"
    article = "an" if item.colour[0] in "aeiou" else "a"
    return f"{article} {item.colour} {item.shape}"


def relation(one: Item, other: Item) -> str:
    """Where `one` lies, seen from `other`; rows count before columns."""
    if one.row != other.row:
        return "above" if one.row < other.row else "below"
    return "left of" if one.column < other.column else "right of"


def unique(items: tuple[Item, ...], *fields: str) -> list[Item]:
    """The items that no other item equals in all of `fields`."""
    keys = [tuple(vars(item)[field] for field in fields) for item in items]
    return [item for item, key in zip(items, keys, strict=True) if keys.count(key) == 1]


def listing(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]


# ---------------------------------------------------------------- captions

CAPTION_PROMPTS = (
    "Describe the image.", "Describe this image.", "Describe the picture.", "Describe this picture.",
    "Describe the image in detail.", "Describe this image in detail.", "Describe what you see.",
    "Describe it.", "What do you see?", "What can you see?", "What do you see in this image?",
    "What do you see in the picture?", "What is in the image?", "What is in this image?",
    "What is in the picture?", "What's in this picture?", "What's in this image?", "What is this?",
    "What is shown here?", "What does the image show?", "Tell me what you see.",
    "Tell me about this picture.", "Tell me about the image.", "Caption this image.",
    "Write a caption for this image.", "Can you describe this image?",
    "Could you describe the picture for me?", "Explain this image.", "Look at this image.",
    "What is going on here?", "Give me a description of the image.",
)  # fmt: skip
BOTTOM_UP_PROMPTS = (
    "Describe the image from bottom to top.",
    "Start at the bottom and describe the image.",
    "Describe the picture from the bottom up.",
)
LAYOUT_PROMPTS = (
    "Where is everything?",
    "Where are the objects?",
    "Describe the layout of the image.",
    "Tell me where things are.",
    "What is where?",
)
SHORT_PROMPTS = (
    "Describe the image in one sentence.",
    "Give a short caption.",
    "Describe the image briefly.",
    "Caption this in one line.",
    "What is this a picture of?",
)
LIST_PROMPTS = (
    "List the objects.",
    "List everything you see.",
    "List all objects in the image.",
    "Make a list of what you see.",
    "Which objects are in the image?",
)

_OPENING = (
    "{the|this} {image|picture|scene|drawing} {shows|contains|holds|presents} $count shapes "
    "{on|over|against} a $background {background|canvas|backdrop|surface}."
)
_ITEM = (
    "{a|next, a|then a|also a|here a} $thing {sits|rests|lies|stands|appears}"
    "{| quietly| neatly| clearly| plainly} at the $position."
)
_WRITING = (
    "{the|next, the|then the|also the|here the} $thing {is written|is drawn|is printed|is shown}"
    "{| quietly| neatly| clearly| plainly} in $colour at the $position."
)
_PLACE = "at the $position, {there is|we see|I notice|you find} $thing{| too| there| here}."
_SIZES = "{overall|in total|altogether|in all}, $count of {them|these|the shapes} {$verbs} large."
_RELATION = "the $one {is|sits|stays|lies} {clearly|well|just|somewhere} $relation the $other."
_REMARK = (
    "{the whole|the entire|the full} {image|picture|scene|drawing} {looks|seems|feels|appears} "
    "{calm|simple|tidy|bright|neat} {to me|overall|today|indeed}."
)


def _item_sentence(rng: random.Random, item: Item) -> str:
    if rng.random() < 1 / 6:
        return _place_sentence(rng, item)
    template = _ITEM if item.kind == "shape" else _WRITING
    return say(rng, template, thing=thing(item), colour=item.colour, position=item.position)


def _place_sentence(rng: random.Random, item: Item) -> str:
    return say(rng, _PLACE, thing=a_thing(item), position=item.position)


def _opening(rng: random.Random, scene: Scene) -> str:
    return say(rng, _OPENING, count=COUNTS[len(scene.shapes)], background=scene.background)


def _closings(rng: random.Random, scene: Scene) -> list[str]:
    """One last sentence, or two for a scene of few items, so that captions have about the same length."""
    num_large = sum(item.size == "large" for item in scene.shapes)
    verbs = "looks|seems|appears|is" if num_large == 1 else "look|seem|appear|are"
    sentences = [
        say(rng, _SIZES.replace("$verbs", verbs), count=COUNTS[num_large]),
        say(rng, _REMARK),
    ]
    named = unique(scene.shapes, "colour", "shape")
    if len(named) > 1:
        one, other = named[0], named[-1]
        words = {"one": f"{one.colour} {one.shape}", "other": f"{other.colour} {other.shape}"}
        sentences.append(say(rng, _RELATION, relation=relation(one, other), **words))
    return rng.sample(sentences, 2 if len(scene.items) == 3 else 1)


def caption(rng: random.Random, scene: Scene, bottom_up: bool = False) -> str:
    """What the model answers to "Describe the image.": an opening, every item in reading order, a closing."""
    items = scene.items[::-1] if bottom_up else scene.items
    sentences = [_opening(rng, scene), *(_item_sentence(rng, item) for item in items), *_closings(rng, scene)]
    return " ".join(sentences)


def layout(rng: random.Random, scene: Scene) -> str:
    return " ".join(_place_sentence(rng, item) for item in scene.items)


def short_caption(rng: random.Random, scene: Scene) -> str:
    things = listing([short_thing(item) for item in scene.items])
    return say(
        rng,
        "{it shows|I see|there is|this is} $things on a $ground {background|canvas|backdrop|surface}.",
        things=things,
        ground=scene.background,
    )


def item_list(rng: random.Random, scene: Scene) -> str:
    head = say(rng, "{here is the list|I found these|these are the objects|I can see}:")
    return "\n".join([head, *(f"{i}. {thing(item)}" for i, item in enumerate(scene.items, 1))])


_TASKS: tuple[tuple[int, tuple[str, ...], Callable[[random.Random, Scene], str]], ...] = (
    (10, CAPTION_PROMPTS, caption),
    (2, BOTTOM_UP_PROMPTS, lambda rng, scene: caption(rng, scene, bottom_up=True)),
    (2, LAYOUT_PROMPTS, layout),
    (1, SHORT_PROMPTS, short_caption),
    (1, LIST_PROMPTS, item_list),
)


def description(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """A request to describe the whole scene, and the answer."""
    _, prompts, answer = rng.choices(_TASKS, [weight for weight, *_ in _TASKS])[0]
    return asked(rng, rng.choice(prompts)), answer(rng, scene)


_REQUESTS = {
    "Describe",
    "Tell",
    "Caption",
    "Write",
    "Explain",
    "Look",
    "Give",
    "List",
    "Make",
    "Read",
    "Count",
}


def asked(rng: random.Random, prompt: str) -> str:
    """The prompt as people type it: at times polite, without capitals or without its full stop."""
    if rng.random() < 0.1 and prompt.split()[0] in _REQUESTS:
        prompt = "Please " + prompt[0].lower() + prompt[1:]
    if rng.random() < 0.12:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.12:
        prompt = prompt.rstrip(".?")
    return prompt


def scene_as_text(scene: Scene) -> str:
    parts = [
        f"{thing(item)}{'' if item.kind == 'shape' else ' in ' + item.colour} {item.position}" for item in scene.items
    ]
    return f"{scene.background} background; " + "; ".join(parts)


# ---------------------------------------------------------------- questions about a scene


def question(rng: random.Random, scene: Scene, where: str = "") -> tuple[str, str]:
    """A question and its answer. `where` is empty or names one image of several: ` in the second image`."""
    kinds = (
        _ask_place,
        _ask_what,
        _ask_count,
        _ask_background,
        _ask_colour,
        _ask_size,
        _ask_writing,
        _ask_relation,
    )
    while True:
        kind = rng.choices(kinds, (5, 4, 2, 1, 2, 2, 2, 2))[0]
        answer = kind(rng, scene)
        if answer is not None:
            return asked(rng, answer[0].replace("@", where)), answer[1]


def _ask_place(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    shapes = unique(scene.shapes, "colour", "shape")
    item = rng.choice([*shapes, *[item for item in scene.items if item.kind != "shape"]] or [None])
    if item is None:
        return None
    name = f"{item.colour} {item.shape}" if item.kind == "shape" else item.kind
    answer = "{it|the $name} {is|sits|lies|appears} at the $position."
    return (
        f"Where is the {name}@?" if rng.random() < 0.7 else f"In which place is the {name}@?",
        say(rng, answer, name=name, position=item.position),
    )


def _ask_what(rng: random.Random, scene: Scene) -> tuple[str, str]:
    covered = {item.cell + 1 for item in scene.items if item.kind == "word"}
    cell = rng.choice([rng.choice(scene.items).cell, rng.choice(scene.items).cell, rng.randrange(len(POSITIONS))])
    cell = cell - 1 if cell in covered else cell
    found = next((item for item in scene.items if item.cell == cell), None)
    ask = say(rng, "{what is|what do you see|which object is|what sits} at the $place@?", place=POSITIONS[cell])
    if found is None:
        return ask, say(rng, "{there is|I see|we find} nothing at the $place.", place=POSITIONS[cell])
    return ask, say(rng, "{there is|I see|we find} $thing at the $place.", thing=a_thing(found), place=POSITIONS[cell])


def _ask_count(rng: random.Random, scene: Scene) -> tuple[str, str]:
    shapes = scene.shapes
    if rng.random() < 0.5:
        number = COUNTS[len(shapes)]
        ask = "{how many shapes are there@?|how many objects do you see@?|count the shapes@.}"
        return say(rng, ask), say(rng, "{there are|I count|I see|we have} $number shapes.", number=number)
    field, word = rng.choice(
        [
            ("colour", rng.choice(shapes).colour),
            ("shape", rng.choice(shapes).shape),
            ("size", "large"),
            ("size", "small"),
        ]
    )
    number = sum(vars(item)[field] == word for item in shapes)
    noun = word if field == "shape" else f"{word} shape"
    noun += "" if number == 1 else "s" if not noun.endswith("s") else "es"
    plural = f"{word}{'es' if word.endswith('s') else 's'}" if field == "shape" else f"{word} shapes"
    there = "{there is|I count|I see|we have}" if number == 1 else "{there are|I count|I see|we have}"
    return f"How many {plural} are there@?", say(rng, there + " $number $noun.", number=COUNTS[number], noun=noun)


def _ask_background(rng: random.Random, scene: Scene) -> tuple[str, str]:
    ask = "{what is the background color@?|what color is the background@?|which color is behind the shapes@?}"
    return say(rng, ask), say(rng, "{the background is|it is|the color is|I see} $ground.", ground=scene.background)


def _ask_colour(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    shapes = unique(scene.shapes, "shape")
    if not shapes:
        return None
    item = rng.choice(shapes)
    ask = rng.choice((f"What color is the {item.shape}@?", f"What is the color of the {item.shape}@?"))
    return ask, say(
        rng,
        "{it is|the $shape is|I see that it is|its color is} $colour.",
        shape=item.shape,
        colour=item.colour,
    )


def _ask_size(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    shapes = unique(scene.shapes, "colour", "shape")
    if not shapes:
        return None
    item = rng.choice(shapes)
    name = f"{item.colour} {item.shape}"
    ask = rng.choice((f"How big is the {name}@?", f"What size is the {name}@?"))
    return ask, say(rng, "{it is|the $name is|it looks|it seems} $size.", name=name, size=item.size)


def _ask_writing(rng: random.Random, scene: Scene) -> tuple[str, str]:
    found = scene.writing
    ask = "{what text is written@?|what is written@?|is there any text@?|read the text@.|what does it say@?}"
    if found is None:
        return say(rng, ask), say(rng, "{no text is written|there is no text|I see no text|nothing is written}.")
    answer = "the $thing {is written|is drawn|is printed|is shown} in $colour."
    return say(rng, ask), say(rng, answer, thing=thing(found), colour=found.colour)


def _ask_relation(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    shapes = unique(scene.shapes, "colour", "shape")
    if len(shapes) < 2:
        return None
    one, other = rng.sample(shapes, 2)
    names = {"one": f"{one.colour} {one.shape}", "other": f"{other.colour} {other.shape}"}
    ask = say(rng, "where is the $one compared to the $other@?", **names)
    return ask, say(
        rng,
        "{it|the $one} {is|sits|stays|lies} $relation the $other.",
        relation=relation(one, other),
        **names,
    )


# ---------------------------------------------------------------- small talk

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that describes images.",
    "You look at small pictures and answer questions about them.",
    "Answer politely.",
    "You are a careful observer. Only say what you can see.",
    "You are tiny-qwen, a tiny model that can see.",
    "Be helpful and honest.",
    "Answer in plain English.",
)

TALK = tomllib.loads((Path(__file__).parent / "talk.toml").read_text())["topic"]

_SHAPE_FACTS = {
    "circle": "is perfectly round and has no corners",
    "square": "has four equal sides and four corners",
    "triangle": "has three sides and three corners",
    "diamond": "is a square that stands on its tip",
    "cross": "is made of two bars that meet",
    "star": "has five points around its middle",
}
_COLOUR_FACTS = {
    "red": "fire and ripe cherries",
    "green": "grass and young leaves",
    "blue": "the sea and the sky",
    "yellow": "lemons and the sun",
    "purple": "plums and lavender",
    "orange": "carrots and autumn leaves",
    "pink": "roses and candy",
    "brown": "wood and chocolate",
}


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A question without an image, and a free answer of 20 to 60 tokens (a few are short exercises)."""
    kind = rng.random()
    if kind < 0.62:
        topic = rng.choice(TALK)
        return asked(rng, rng.choice(topic["prompts"])), _sentences(say(rng, rng.choice(topic["answers"])))
    if kind < 0.74:
        shape = rng.choice(SHAPES)
        ask = rng.choice((f"What is a {shape}?", f"Tell me about a {shape}.", f"Explain what a {shape} is."))
        answer = (
            "a $shape {is|makes|gives} a {simple|common|nice|useful} {shape|figure|form}. it $fact. "
            "people {often|sometimes|gladly|mostly} {draw|use|choose|paint} it "
            "{for signs|in games|on walls|in books}, and {children|artists|builders|teachers} "
            "{know|like|love|learn} it {well|early|too|best}."
        )
        return asked(rng, ask), _sentences(say(rng, answer, shape=shape, fact=_SHAPE_FACTS[shape]))
    if kind < 0.86:
        colour = rng.choice(tuple(COLOURS))
        ask = rng.choice(
            (
                f"What do you think about {colour}?",
                f"Tell me about the color {colour}.",
                f"Do you like {colour}?",
            )
        )
        answer = (
            "$colour is a {fine|strong|lovely|pleasant} color. it {makes|lets|helps} me think of $fact. "
            "{many|most|some|few} people {wear|paint|choose|like} it "
            "{in summer|at home|for parties|on holidays}, "
            "{and|but|since} it {looks|seems|feels|stays} {warm|fresh|bold|calm} {next to|beside|near|under} "
            "$other."
        )
        other = rng.choice([name for name in COLOURS if name != colour])
        return asked(rng, ask), _sentences(say(rng, answer, colour=colour, fact=_COLOUR_FACTS[colour], other=other))
    return _exercise(rng)


def _exercise(rng: random.Random) -> tuple[str, str]:
    kind = rng.randrange(3)
    if kind == 0:
        start = rng.randint(1, 12)
        numbers = ", ".join(str(start + i) for i in range(6))
        return f"Count from {start} to {start + 5}.", say(
            rng, "{sure|here you go|of course|gladly}: $numbers.", numbers=numbers
        )
    if kind == 1:
        names = rng.sample(tuple(COLOURS), 3)
        ask = f"Put these colors in reverse order: {', '.join(names)}."
        answer = "{sure|here you go|of course|gladly}: $names."
        return ask, say(rng, answer, names=", ".join(names[::-1]))
    word = rng.choice(WORDS)
    return f"Spell the word {word}.", say(
        rng, "{sure|here you go|of course|gladly}: $letters.", letters=", ".join(word)
    )


def _sentences(text: str) -> str:
    """Gives every sentence its capital."""
    return re.sub(r"(?<=[.!?] )[a-z]", lambda match: match[0].upper(), text)


# ---------------------------------------------------------------- whole chats


def training_scene(seed: int) -> tuple[Scene, Image.Image]:
    """The scene and picture of a seed; of -1 - seed, that scene's writing, or its first shape, alone."""
    if seed >= 0:
        return scene_from_seed(seed)
    rng = random.Random(-1 - seed)
    whole = sample_scene(rng)
    scene = Scene(whole.background, (whole.writing or whole.items[0],))
    return scene, render(scene, rng)


class Chats:
    """Draws chats for training. `seeds` are the scene seeds to draw from; `writing` is the share of scenes that are
    chosen for their number or word, both equally often, rather than taken as they come; `alone` is the share of chats
    that describe a picture of one thing alone (`training_scene` of a negative seed), of `alone_kinds`.
    """

    def __init__(
        self,
        rng: random.Random,
        seeds: range = range(HELD_OUT_SEED),
        writing: float = 0.0,
        alone: float = 0.0,
        alone_kinds: tuple[str, ...] = ("shape", "number", "word"),
    ):
        self.rng = rng
        self.seeds = seeds
        self.writing = writing
        self.alone = alone
        self.alone_kinds = alone_kinds

    def draw(self) -> list[Message]:
        """One chat of a random kind."""
        if self.alone and self.rng.random() < self.alone:
            return self._one_thing()
        kinds = (
            self._described,
            self._asked_about,
            self._from_text,
            self._talk,
            self._many_images,
            self._long,
        )
        messages = self.rng.choices(kinds, (50, 22, 6, 11, 9, 2))[0]()
        if self.rng.random() < 0.1:
            messages.insert(0, {"role": "system", "content": self.rng.choice(SYSTEM_PROMPTS)})
        return messages

    def _scene(self) -> tuple[int, Scene]:
        wanted = self.rng.choice(("number", "word")) if self.writing and self.rng.random() < self.writing else None
        while True:
            seed = self.rng.choice(self.seeds)
            scene = sample_scene(random.Random(seed))
            if wanted is None or (scene.writing is not None and scene.writing.kind == wanted):
                return seed, scene

    def _user(self, text: str, *seeds: int) -> Message:
        """A user's message; the images come before the text, and after it in one of four."""
        if not seeds:
            return {"role": "user", "content": text}
        images = [{"type": "image", "seed": seed} for seed in seeds]
        words = [{"type": "text", "text": text}]
        return {"role": "user", "content": words + images if self.rng.random() < 0.25 else images + words}

    def _turn(self, ask: str, answer: str, *seeds: int) -> list[Message]:
        return [self._user(ask, *seeds), {"role": "assistant", "content": answer}]

    def _with_talk_before(self, messages: list[Message]) -> list[Message]:
        before = self._turn(*small_talk(self.rng)) if self.rng.random() < 0.11 else []
        return before + messages

    def _described(self) -> list[Message]:
        seed, scene = self._scene()
        messages = self._turn(*description(self.rng, scene), seed)
        if self.rng.random() < 0.35:
            messages += self._turn(*question(self.rng, scene))
        return self._with_talk_before(messages)

    def _one_thing(self) -> list[Message]:
        kind, scene, seed = self.rng.choice(self.alone_kinds), None, 0
        while scene is None or scene.items[0].kind != kind:
            seed = -1 - self.rng.choice(self.seeds)
            scene, _ = training_scene(seed)
        return self._turn(asked(self.rng, self.rng.choice(CAPTION_PROMPTS)), caption(self.rng, scene), seed)

    def _asked_about(self) -> list[Message]:
        seed, scene = self._scene()
        messages = self._turn(*question(self.rng, scene), seed)
        for _ in range(self.rng.randint(1, 4)):
            messages += self._turn(*question(self.rng, scene))
        return self._with_talk_before(messages)

    def _from_text(self) -> list[Message]:
        _, scene = self._scene()
        ask = self.rng.choice(
            ("Describe this scene: ", "Describe the image of this list: ", "Imagine this and describe it: ")
        )
        return self._turn(ask + scene_as_text(scene), caption(self.rng, scene))

    def _talk(self) -> list[Message]:
        return [message for _ in range(self.rng.randint(1, 3)) for message in self._turn(*small_talk(self.rng))]

    def _many_images(self, num_images: int | None = None) -> list[Message]:
        """Two or three images, in one message or one a turn, and what is said about each."""
        num_images = num_images or self.rng.choice((2, 2, 3))
        drawn = [self._scene() for _ in range(num_images)]
        if self.rng.random() < 0.35:
            messages = []
            for seed, scene in drawn:
                about = description if self.rng.random() < 0.4 else question
                messages += self._turn(*about(self.rng, scene), seed)
            return messages
        first = self._about_one(drawn)
        content = []
        labelled = self.rng.random() < 0.4
        for i, (seed, _) in enumerate(drawn):
            if labelled:
                content.append({"type": "text", "text": f"Image {i + 1}: " if i == 0 else f" Image {i + 1}: "})
            content.append({"type": "image", "seed": seed})
        content.append({"type": "text", "text": first[0]})
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": first[1]}]
        for _ in range(self.rng.randint(0, 2)):
            messages += self._turn(*self._about_one(drawn))
        return messages

    def _about_one(self, drawn: list[tuple[int, Scene]]) -> tuple[str, str]:
        """A question or a caption for one of several images, named by its place."""
        i = self.rng.randrange(len(drawn))
        scene = drawn[i][1]
        which = "last" if i == len(drawn) - 1 and self.rng.random() < 0.25 else ORDINALS[i]
        noun = self.rng.choice(("image", "picture"))
        if self.rng.random() < 0.35:
            ask = self.rng.choice((f"Describe the {which} {noun}.", f"What do you see in the {which} {noun}?"))
            return asked(self.rng, ask), caption(self.rng, scene)
        return question(self.rng, scene, f" in the {which} {noun}")

    def _long(self) -> list[Message]:
        """400 to 800 tokens: much text, then an image or several, and what is said about them."""
        images = self._many_images(self.rng.randint(4, 8)) if self.rng.random() < 0.6 else self._described()
        messages = []
        num_words = self.rng.randint(330, 620) - _num_words(images)
        while _num_words(messages) < num_words:
            messages += self._from_text() if self.rng.random() < 0.5 else self._talk()
        return messages + images


def _num_words(messages: list[Message]) -> int:
    """About how long a chat is; a picture counts as the words that would take as many tokens."""
    parts = [
        part
        for message in messages
        for part in (
            [{"type": "text", "text": message["content"]}]
            if isinstance(message["content"], str)
            else message["content"]
        )
    ]
    return sum(len(part["text"].split()) if part["type"] == "text" else 14 for part in parts)
