"""The few things every child knows, written by hand: colors, sounds, days, opposites, numbers of legs."""

from random import Random

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import article
from recipes.tiny.words import row
from recipes.tiny.world import World


def _table(text: str) -> list[tuple[str, str]]:
    """`sky:blue grass:green` -> pairs; an underscore stands for a space."""
    pairs = (entry.split(":") for entry in text.split())
    return [(key.replace("_", " "), value.replace("_", " ")) for key, value in pairs]


COLOR_OF = _table(
    "the_sky:blue grass:green the_sun:yellow snow:white coal:black a_banana:yellow a_strawberry:red "
    "a_carrot:orange a_leaf:green a_lemon:yellow a_tomato:red milk:white the_night:black a_frog:green "
    "an_elephant:gray a_pumpkin:orange a_cherry:red a_cloud:white chocolate:brown the_sea:blue "
    "a_polar_bear:white a_crow:black a_pea:green"
)
SOUND_OF = _table(
    "dog:woof cat:meow cow:moo duck:quack sheep:baa pig:oink lion:roar bird:tweet frog:croak horse:neigh "
    "bee:buzz owl:hoot rooster:cock-a-doodle-doo mouse:squeak snake:hiss hen:cluck donkey:hee-haw"
)
BABY_OF = _table(
    "dog:puppy cat:kitten cow:calf sheep:lamb hen:chick duck:duckling horse:foal goat:kid bear:cub lion:cub "
    "frog:tadpole pig:piglet goose:gosling deer:fawn kangaroo:joey swan:cygnet"
)
HOME_OF = _table(
    "bird:nest bee:hive rabbit:burrow bear:cave horse:stable cow:barn spider:web fox:den ant:hill "
    "squirrel:tree fish:water duck:pond whale:sea king:castle mouse:hole"
)
LEGS_OF = _table(
    "dog:4 cat:4 bird:2 spider:8 ant:6 fish:0 horse:4 snake:0 bee:6 duck:2 cow:4 frog:4 person:2 elephant:4 "
    "worm:0 butterfly:6 hen:2 pig:4 lion:4"
)
OPPOSITES = _table(
    "hot:cold big:small tall:short long:short fast:slow old:young new:old happy:sad good:bad day:night "
    "up:down in:out open:closed wet:dry hard:soft light:dark heavy:light loud:quiet full:empty clean:dirty "
    "rich:poor strong:weak near:far high:low first:last early:late left:right right:wrong true:false "
    "begin:end push:pull give:take buy:sell love:hate win:lose front:back inside:outside thick:thin "
    "wide:narrow sweet:sour awake:asleep easy:hard black:white yes:no"
)
HOW_MANY = _table(
    "days_are_in_a_week:7 months_are_in_a_year:12 hours_are_in_a_day:24 minutes_are_in_an_hour:60 "
    "seconds_are_in_a_minute:60 letters_are_in_the_alphabet:26 fingers_are_on_one_hand:5 "
    "sides_does_a_triangle_have:3 sides_does_a_square_have:4 wheels_does_a_car_have:4 "
    "wheels_does_a_bike_have:2 colors_does_a_rainbow_have:7 seasons_are_in_a_year:4 "
    "cents_are_in_a_dollar:100 things_are_in_a_dozen:12 wings_does_a_bird_have:2 "
    "eyes_do_you_have_if_you_are_a_person:2 corners_does_a_triangle_have:3 toes_does_a_person_have:10 "
    "weeks_are_in_a_year:52 legs_does_a_chair_have:4"
)
USED_FOR = _table(
    "spoon:eat_soup pen:write bed:sleep knife:cut key:open_a_door umbrella:stay_dry_in_the_rain "
    "broom:sweep_the_floor cup:drink book:read ball:play chair:sit lamp:make_light clock:tell_the_time "
    "boat:go_over_water phone:call_a_friend towel:get_dry oven:bake soap:wash hammer:hit_a_nail "
    "ladder:climb_up brush:paint coat:stay_warm bag:carry_things needle:sew kite:fly_it_in_the_wind "
    "scissors:cut_paper"
)
WHO_DOES = _table(
    "bakes_bread:a_baker helps_sick_people:a_doctor teaches_children:a_teacher grows_food:a_farmer "
    "flies_a_plane:a_pilot puts_out_fires:a_firefighter sails_a_ship:a_sailor paints_pictures:a_painter "
    "catches_fish:a_fisher cooks_in_a_restaurant:a_cook drives_a_bus:a_bus_driver makes_clothes:a_tailor "
    "writes_books:a_writer fixes_teeth:a_dentist builds_houses:a_builder cuts_hair:a_barber "
    "brings_letters:a_mail_carrier"
)
COMES_FROM = _table(
    "milk:cows honey:bees eggs:hens wool:sheep apples:trees wood:trees flour:wheat butter:milk cheese:milk "
    "rain:clouds light:the_sun silk:worms ham:pigs feathers:birds grapes:vines bread:flour"
)
DAYS = row("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = row("January February March April May June July August September October November December")
SEASONS = row("spring summer fall winter")
LETTERS = [chr(code) for code in range(ord("A"), ord("Z") + 1)]


def child_fact(world: World, rng: Random, max_tokens: int) -> Draft:
    """One or two of them."""
    makers = (
        _color,
        _sound,
        _baby,
        _home,
        _legs,
        _opposite,
        _opposite,
        _how_many,
        _use,
        _who,
        _from,
        _order,
        _order,
    )
    return Draft(tuple(maker(rng) for maker in rng.sample(makers, rng.choice((1, 1, 2)))))


def _subject(thing: str) -> str:
    return thing if thing in ("scissors", "soap") else f"{article(thing)} {thing}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _color(rng: Random) -> Exchange:
    thing, color = rng.choice(COLOR_OF)
    asked = rng.choice(
        (f"What color is {thing}?", f"Which color does {thing} have?", f"Tell me the color of {thing}.")
    )
    return Exchange(asked, f"I think of {thing}. It is {color}.", f"{_capital(thing)} is {color}.")


def _sound(rng: Random) -> Exchange:
    animal, sound = rng.choice(SOUND_OF)
    asked = rng.choice(
        (f"What does {article(animal)} {animal} say?", f"What sound does {article(animal)} {animal} make?")
    )
    return Exchange(
        asked,
        f"I think of the sound of {article(animal)} {animal}.",
        f"{_capital(article(animal))} {animal} says {sound}.",
    )


def _baby(rng: Random) -> Exchange:
    animal, baby = rng.choice(BABY_OF)
    asked = rng.choice((f"What is a baby {animal} called?", f"What do you call a young {animal}?"))
    return Exchange(asked, f"I think of a young {animal}.", f"A baby {animal} is called a {baby}.")


def _home(rng: Random) -> Exchange:
    animal, home = rng.choice(HOME_OF)
    subject = f"{article(animal)} {animal}"
    place = f"in the {home}" if home in ("water", "sea") else f"in {article(home)} {home}"
    return Exchange(
        f"Where does {subject} live?",
        f"I think of the home of {subject}.",
        f"{_capital(subject)} lives {place}.",
    )


def _legs(rng: Random) -> Exchange:
    animal, legs = rng.choice(LEGS_OF)
    subject = f"{article(animal)} {animal}"
    answer = f"{_capital(subject)} has {'no' if legs == '0' else legs} legs."
    return Exchange(
        f"How many legs does {subject} have?", f"I think of {subject} and count the legs.", answer
    )


def _opposite(rng: Random) -> Exchange:
    word, other = rng.choice(OPPOSITES)
    asked = rng.choice(
        (
            f"What is the opposite of {word}?",
            f"Tell me the opposite of {word}.",
            f"{_capital(word)} is the opposite of what?",
        )
    )
    return Exchange(asked, f"The other side of {word} is {other}.", f"The opposite of {word} is {other}.")


def _how_many(rng: Random) -> Exchange:
    what, count = rng.choice(HOW_MANY)
    noun, _, rest = what.partition(" ")
    answer = f"There {rest.replace('are', f'are {count} {noun}', 1)}." if rest.startswith("are") else ""
    if rest.startswith("does "):
        answer = f"{_capital(rest.removeprefix('does ').removesuffix(' have'))} has {count} {noun}."
    elif not answer:
        answer = f"A person has {count} {noun}."
    return Exchange(f"How many {what}?", f"I know this number. It is {count}.", answer)


def _use(rng: Random) -> Exchange:
    thing, use = rng.choice(USED_FOR)
    subject = _subject(thing)
    asked = rng.choice(
        (f"What is {subject} for?", f"What do you do with {subject}?", f"What can I do with {subject}?")
    )
    return Exchange(asked, f"I think of how people use {subject}.", f"With {subject} you can {use}.")


def _who(rng: Random) -> Exchange:
    does, who = rng.choice(WHO_DOES)
    return Exchange(f"Who {does}?", "I think of the job.", f"{_capital(who)} {does}.")


def _from(rng: Random) -> Exchange:
    thing, source = rng.choice(COMES_FROM)
    verb, comes = ("do", "come") if thing.endswith("s") else ("does", "comes")
    return Exchange(
        f"Where {verb} {thing} come from?",
        f"I think of {thing}.",
        f"{_capital(thing)} {comes} from {source}.",
    )


def _order(rng: Random) -> Exchange:
    kind, row = rng.choice((("day", DAYS), ("month", MONTHS), ("season", SEASONS), ("letter", LETTERS)))
    step = rng.choice((1, -1))
    at = rng.randrange(len(row)) if kind != "letter" else rng.randrange(1, 25)
    this, found = row[at], row[(at + step) % len(row)]
    word = "after" if step > 0 else "before"
    asked = rng.choice(
        (f"Which {kind} comes {word} {this}?", f"What comes {word} {this}?", f"What {kind} is {word} {this}?")
    )
    around = f"{found}, {this}" if step < 0 else f"{this}, {found}"
    return Exchange(asked, f"The order is {around}.", f"{found[0].upper() + found[1:]} comes {word} {this}.")
