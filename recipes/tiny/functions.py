"""Functions that a model may be offered: families with many names and wordings, and ones made up wholly.

A family is written as lines of `part: a | b | c`. Slots are `key1,key2=type`; an optional one has `?`. An ask
may leave out optional slots only. Results are `key=type` and answers name the keys of slots and results.
"""

from dataclasses import dataclass
from json import dumps
from random import Random
from typing import Any

from recipes.tiny.values import JSON_TYPES, MAKERS, in_words, made_up, noun
from recipes.tiny.words import is_held_out_word, row
from recipes.tiny.world import World

FAMILIES = """
names: get_weather | weather | current_weather | fetch_weather | weather_in | lookup_weather
about: Get the weather in a city. | Current weather for a place. | Look up the weather. | Weather now
slots: city,location,place,town=city; unit?=enum celsius fahrenheit
asks: What is the weather in {city}? | How is the weather in {city}? | Weather in {city} | Is it raining in {city}? | Tell me the weather for {city}. | What's the weather like in {city} in {unit}? | Do I need an umbrella in {city}? | How warm is it in {city}? | Is it cold in {city} today? | Give me the weather in {city} in {unit}.
result: temperature=degrees; condition=sky
answers: In {city} it is {temperature} degrees and {condition}. | The weather in {city}: {temperature} degrees, {condition}. | It is {temperature} degrees in {city}, {condition}.

names: get_forecast | forecast | weather_forecast
about: Weather forecast for a city and a day. | Get the forecast.
slots: city,location,place=city; day,date,when=day
asks: What will the weather be in {city} {on}{day}? | Will it rain in {city} {on}{day}? | Forecast for {city} {on}{day} | How warm will it be in {city} {on}{day}?
result: temperature=degrees; condition=sky
answers: {Day} it will be {temperature} degrees in {city}, {condition}. | The forecast for {city} {on}{day}: {temperature} degrees, {condition}.

names: get_time | current_time | time_in | local_time | clock
about: Get the local time in a city. | What time it is somewhere. | Current time of a place
slots: city,location,place,timezone=city
asks: What time is it in {city}? | Tell me the time in {city}. | What is the local time in {city}? | Current time in {city} please
result: time=time
answers: It is {time} in {city}. | The time in {city} is {time}.

names: set_timer | start_timer | timer | create_timer
about: Start a timer. | Set a timer for some minutes. | Counts down minutes
slots: minutes,duration,duration_minutes,length=int
asks: Set a timer for {minutes} minutes. | Start a {minutes} minute timer | Wake me in {minutes} minutes. | Timer for {minutes} minutes please | Please count down {minutes} minutes.
result: ok
answers: The timer is set for {minutes} minutes. | Your timer runs for {minutes} minutes.

names: set_alarm | alarm | create_alarm | add_alarm
about: Set an alarm at a time. | Wake the user.
slots: time,at,hour=time; label?,name?=word
asks: Set an alarm for {time}. | Wake me up at {time}. | Alarm at {time} please | Set an alarm called {label} at {time}.
result: ok
answers: The alarm is set for {time}. | I set an alarm at {time}.

names: add_reminder | remind | create_reminder | set_reminder
about: Create a reminder. | Remind the user of something.
slots: text,what,message,task,title=text; time,when,at=time
asks: Remind me at {time}: {text} | Set a reminder for {time}: "{text}" | At {time} remind me: {text}
result: ok
answers: I will remind you at {time}. | The reminder is set for {time}.

names: send_email | email | mail | write_email | send_mail
about: Send an email. | Writes a mail to somebody.
slots: to,recipient,address=email; subject?,title?=title; body,text,message,content=text
asks: Send an email to {to} saying "{body}" | Email {to}: {body} | Write to {to} with the subject "{subject}" and the text "{body}". | Send {to} a mail with subject {subject} and body "{body}"
result: ok
answers: The email to {to} is sent. | I sent the email to {to}.

names: send_message | message | text_message | send_sms | notify
about: Send a message to a person. | Text a contact. | Send a text message.
slots: to,recipient,person,contact,name=person; text,message,body,content=text
asks: Tell {to}: {text} | Send {to} the message "{text}" | Text {to} "{text}" | Message {to} that says "{text}" | Write to {to}: {text}
result: ok
answers: I sent the message to {to}. | {to} has your message.

names: call_contact | call | phone_call | dial
about: Call a person. | Start a phone call.
slots: name,contact,person,who=person
asks: Call {name}. | Please phone {name} | I want to talk to {name}, call now. | Ring {name}
result: ok
answers: I am calling {name}. | The call to {name} is started.

names: find_phone_number | get_phone | lookup_contact | contact_info
about: Find the phone number of a person. | Look up a contact.
slots: name,person,contact=person
asks: What is the phone number of {name}? | Find the number of {name}. | How can I reach {name} by phone? | Look up {name} in my contacts
result: phone=phone
answers: The phone number of {name} is {phone}. | {name} has the number {phone}.

names: create_event | add_event | schedule_meeting | add_to_calendar | book_meeting
about: Add an event to the calendar. | Schedule a meeting.
slots: title,name,event,what=title; date,day,on=date; time?,start?,at?=time
asks: Add "{title}" to my calendar on {date}. | Schedule {title} on {date} at {time}. | Put {title} in the calendar for {date} at {time} | Make an event called {title} on {date}
result: ok
answers: {title} is in your calendar on {date}. | I added {title} on {date}.

names: list_events | get_calendar | calendar | get_schedule
about: List the events of a day. | Show the calendar of a day.
slots: date,day=date
asks: What do I have on {date}? | Show my calendar for {date}. | Which meetings are on {date}? | What is planned for {date}?
result: events=items
answers: On {date} you have {events}. | Your calendar on {date}: {events}.

names: web_search | search | search_web | google | search_internet
about: Search the web. | Look something up on the internet. | Finds pages
slots: query,q,text,search_term=title
asks: Search the web for {query}. | Look up "{query}" online | Find pages about {query} | Google {query} | Search for {query}
result: title=title; url=url
answers: I found "{title}" at {url}. | The first page is {title}: {url}

names: search_flights | find_flights | flights | flight_search
about: Find flights between two cities. | Search flights on a date.
slots: from,origin,departure,from_city=city; to,destination,arrival,to_city=city; date,day,departure_date=date
asks: Find flights from {from} to {to} on {date}. | I want to fly from {from} to {to} on {date} | Flights to {to} from {from} on {date} please | Which flights go from {from} to {to} on {date}?
result: flight=id; price=large
answers: Flight {flight} costs {price}. | There is flight {flight} for {price}.

names: book_hotel | reserve_room | hotel_booking | book_room
about: Book a hotel room. | Reserve a room in a city.
slots: city,location,place=city; date,check_in,arrival=date; nights,num_nights=int; guests?,people?=int
asks: Book a hotel in {city} from {date} for {nights} nights. | I need a room in {city} on {date} for {nights} nights and {guests} guests. | Reserve a room in {city}, {date}, {nights} nights
result: booking_id=id
answers: Your room in {city} is booked. The number is {booking_id}. | Booked: {booking_id}, {nights} nights in {city}.

names: book_table | reserve_table | restaurant_reservation | make_reservation
about: Reserve a table. | Book a table at a restaurant.
slots: restaurant,place,name=title; people,guests,party_size,seats=int; time,at=time
asks: Book a table for {people} at {restaurant} at {time}. | Reserve a table at {restaurant} for {people} people at {time} | Table for {people} at {time} in {restaurant} please
result: ok
answers: A table for {people} at {restaurant} is reserved at {time}. | Your table at {restaurant} is booked for {time}.

names: order_taxi | call_taxi | get_ride | book_ride
about: Order a taxi. | Get a ride.
slots: from,pickup,start=place; to,destination,goal=place
asks: Order a taxi from {from} to {to}. | I need a ride from {from} to {to} | Get me a cab from {from} to {to}
result: minutes=int
answers: The taxi comes in {minutes} minutes. | Your ride to {to} is here in {minutes} minutes.

names: order_food | place_order | order | buy
about: Order something. | Place an order.
slots: item,product,dish,what=item; quantity,count,amount,number=int
asks: Order {quantity} {item}. | I want to buy {quantity} {item} | Please order {quantity} of the {item} | Get me {quantity} {item}
result: order_id=id
answers: I ordered {quantity} {item}. The order is {order_id}. | Done, order {order_id}.

names: play_music | play_song | play | start_music
about: Play music. | Play a song by name.
slots: song,title,query,track=title; artist?,by?=person
asks: Play {song}. | Play the song {song} by {artist}. | Put on {song} | I want to hear {song} by {artist}
result: ok
answers: Now playing {song}. | I play {song}.

names: turn_on_light | lights | set_light | switch_light | control_light
about: Switch a light in a room. | Turn lights on or off.
slots: room,place,location=room; state,status,mode=enum on off
asks: Turn {state} the light in the {room}. | Switch the {room} light {state}. | Lights {state} in the {room} please | Please turn the light in the {room} {state}
result: ok
answers: The light in the {room} is {state}. | I turned the {room} light {state}.

names: set_temperature | thermostat | set_thermostat | heat
about: Set the temperature of a room. | Controls the heating.
slots: room,place,zone=room; degrees,temperature,value,target=degrees
asks: Set the {room} to {degrees} degrees. | Heat the {room} to {degrees} degrees | Make it {degrees} degrees in the {room}.
result: ok
answers: The {room} is set to {degrees} degrees. | I set {degrees} degrees in the {room}.

names: translate | translate_text | translation
about: Translate a text. | Translates into another language.
slots: text,sentence,phrase,input=text; language,to,target,target_language=language
asks: Translate "{text}" to {language}. | What is "{text}" in {language}? | How do you say "{text}" in {language}? | Put this into {language}: {text}
result: translation=title
answers: In {language} it is: {translation} | "{translation}"

names: convert_currency | exchange | currency_converter | convert_money
about: Convert money. | Convert an amount to another currency.
slots: amount,value,money=number; from,from_currency,source=currency; to,to_currency,target=currency
asks: How much is {amount} {from} in {to}? | Convert {amount} {from} to {to}. | Change {amount} {from} into {to} | What are {amount} {from} in {to}?
result: amount_out=number
answers: {amount} {from} are {amount_out} {to}. | That is {amount_out} {to}.

names: get_stock_price | stock | stock_price | quote
about: Price of a stock. | Get the share price of a company.
slots: symbol,ticker,company,name=company
asks: What is the stock price of {symbol}? | How is {symbol} doing on the stock market? | Price of {symbol} shares | Get me the quote of {symbol}.
result: price=number
answers: {symbol} costs {price}. | The price of {symbol} is {price}.

names: get_news | news | latest_news | headlines
about: Get news about a topic. | Latest headlines.
slots: topic,subject,query,about=title
asks: What is the news about {topic}? | Show me headlines on {topic}. | Any news on {topic}?
result: headline=title
answers: The news: {headline}. | {headline}

names: add | add_numbers | sum | plus
about: Add two numbers. | Returns the sum of a and b.
slots: a,x,first,num1=number; b,y,second,num2=number
asks: What is {a} + {b}? | Add {a} and {b}. | {a} plus {b} | Sum of {a} and {b}? | Use the tool to add {a} and {b}.
result: =sum
answers: {a} + {b} = {result}. | The sum is {result}. | {result}

names: multiply | times | product | multiply_numbers | mul
about: Multiply two numbers. | Returns a times b.
slots: a,x,first,num1=number; b,y,second,num2=number
asks: What is {a} x {b}? | Multiply {a} by {b}. | {a} times {b} | {a} * {b}
result: =product
answers: {a} x {b} = {result}. | The product is {result}. | {result}

names: subtract | minus | difference | subtract_numbers
about: Subtract b from a. | Returns a minus b.
slots: a,x,first=number; b,y,second=number
asks: What is {a} - {b}? | Take {b} from {a}. | {a} minus {b}
result: =difference
answers: {a} - {b} = {result}. | The difference is {result}.

names: calculate | calculator | evaluate | compute | eval_expression
about: Evaluate an expression. | A calculator. | Compute a formula.
slots: expression,formula,expr,input=sum
asks: What is {expression}? | Calculate {expression}. | Compute {expression} | Use the calculator: {expression} | Evaluate {expression}
result: =large
answers: {expression} = {result}. | The result is {result}. | {result}

names: convert_units | unit_converter | convert
about: Convert between units. | Converts a value to another unit.
slots: value,amount,number=number; from_unit,from,unit=unit; to_unit,to,target=unit
asks: How many {to_unit} are {value} {from_unit}? | Convert {value} {from_unit} to {to_unit}. | {value} {from_unit} in {to_unit}
result: =number
answers: {value} {from_unit} are {result} {to_unit}. | That is {result} {to_unit}.

names: define_word | dictionary | get_definition | lookup_word
about: Look up a word in the dictionary. | Definition of a word.
slots: word,term,query=word
asks: What does {word} mean? | Define {word}. | Look up the word {word} | What is the definition of {word}?
result: definition=title
answers: {word}: {definition}. | {word} means {definition}.

names: get_order_status | order_status | track_order | check_order
about: Status of an order. | Where an order is.
slots: order_id,order,id,number=id
asks: Where is my order {order_id}? | What is the status of order {order_id}? | Check order {order_id} | Has order {order_id} been sent?
result: status=status; date=date
answers: Order {order_id} is {status}, {date}. | The order is {status} ({date}).

names: track_package | parcel_status | track_parcel
about: Track a package. | Find a parcel.
slots: tracking_number,code,number,id=id
asks: Where is package {tracking_number}? | Track {tracking_number}. | When does parcel {tracking_number} come?
result: status=status; city=city
answers: The package is {status} in {city}. | It is {status}, now in {city}.

names: get_user | find_user | lookup_customer | get_customer | user_info
about: Find a user by name. | Data of a customer.
slots: name,user,customer,username=person
asks: Find the user {name}. | Look up customer {name}. | Get the data of {name}. | Who is the customer {name}?
result: id=id; email=email
answers: {name} has the id {id} and the email {email}. | User {name}: id {id}, {email}.

names: get_balance | account_balance | balance | check_account
about: Balance of an account. | How much money an account has.
slots: account,account_id,id=id
asks: How much money is on account {account}? | What is the balance of account {account}? | Check account {account}.
result: balance=number
answers: The balance of account {account} is {balance}. | There are {balance} on account {account}.

names: transfer_money | pay | send_money | transfer
about: Send money to a person. | Transfer an amount.
slots: to,recipient,person=person; amount,value,sum=number
asks: Send {amount} to {to}. | Pay {to} {amount} dollars | Transfer {amount} dollars to {to}.
result: ok
answers: I sent {amount} to {to}. | {to} gets {amount}.

names: read_file | open_file | cat | get_file
about: Read a file. | Returns what a file holds.
slots: path,file,filename,name=path
asks: Read {path}. | What is in {path}? | Show me the file {path} | Open {path}
result: =text
answers: {path} says: {result} | The file holds: {result}

names: write_file | save_file | create_file
about: Write a file. | Save text to a file.
slots: path,file,filename=path; content,text,data=text
asks: Write "{content}" to {path}. | Save "{content}" in {path} | Make a file {path} with the text "{content}"
result: ok
answers: I wrote {path}. | {path} is saved.

names: delete_file | remove_file | rm | delete
about: Delete a file. | Removes a file.
slots: path,file,filename=path
asks: Delete {path}. | Remove the file {path} | Please delete {path}
result: ok
answers: {path} is deleted. | I removed {path}.

names: list_files | ls | list_directory
about: List the files of a folder. | What is in a directory.
slots: folder,path,directory=folder
asks: Which files are in {folder}? | List {folder}. | Show me the files in {folder}
result: files=items
answers: In {folder} there are {files}. | The files: {files}.

names: add_todo | create_task | add_task | new_todo
about: Add a task to the list. | Create a todo.
slots: task,text,title,item=text; priority?,importance?=enum low medium high
asks: Add to my list: {task} | New task: {task} | Put "{task}" on my todo list with {priority} priority | Create a {priority} priority task "{task}"
result: ok
answers: I added it: {task} | The task is on your list.

names: add_to_shopping_list | shopping_list | add_groceries
about: Put things on the shopping list. | Add groceries.
slots: items,products,things,list=items
asks: Put {items} on the shopping list. | Add {items} to my shopping list | I need to buy {items}. | We are out of {items}, write it down.
result: ok
answers: {items} are on the list. | I added {items}.

names: create_note | save_note | note | write_note
about: Save a note. | Write something down.
slots: title?,name?=title; text,content,body=text
asks: Make a note: {text} | Note down "{text}" | Save a note called {title}: {text}
result: ok
answers: The note is saved. | I wrote it down.

names: roll_dice | dice | roll
about: Roll dice. | Throws some dice.
slots: sides,faces=int; count?,times?,n?=int
asks: Roll a die with {sides} sides. | Throw {count} dice with {sides} sides | Roll {count} dice of {sides} sides
result: =integer
answers: You rolled {result}. | The dice show {result}.

names: get_random_number | random_number | random | pick_number
about: A random number between two limits. | Pick a number.
slots: min,low,from,start=int; max,high,to,end=large
asks: Give me a random number from {min} to {max}. | Pick a number between {min} and {max} | A random number, at least {min} and at most {max}.
result: =integer
answers: Your number is {result}. | I picked {result}.

names: get_price | price_of | check_price | product_price
about: Price of a product. | What something costs.
slots: product,item,name,article=item
asks: How much is the {product}? | What does the {product} cost? | Price of {product} | What is the price of the {product}?
result: price=number
answers: The {product} costs {price}. | It is {price}.

names: check_stock | get_inventory | in_stock | inventory
about: How many pieces are in the store. | Check the stock of a product.
slots: product,item,article,name=item
asks: Do you have {product} in stock? | How many {product} are left? | Check the stock of {product}.
result: count=int
answers: There are {count} {product} left. | {count} in stock.

names: find_recipe | get_recipe | recipe | recipes
about: Find a recipe. | How to cook a dish.
slots: dish,food,name,query=item
asks: Find a recipe for {dish}. | How do I cook {dish}? | I want to make {dish}, look for a recipe.
result: recipe=title; minutes=int
answers: Try "{recipe}". It takes {minutes} minutes. | I found {recipe}, {minutes} minutes.

names: get_distance | distance | route | directions | how_far
about: Distance between two places. | Find a route.
slots: from,start,origin,a=city; to,end,destination,b=city
asks: How far is it from {from} to {to}? | What is the distance between {from} and {to}? | Route from {from} to {to}
result: km=large
answers: It is {km} km from {from} to {to}. | {km} km.

names: get_population | population | city_population
about: Number of people in a city. | Population of a place.
slots: city,place,name=city
asks: How many people live in {city}? | What is the population of {city}?
result: population=large
answers: {population} people live in {city}. | {city} has {population} people.

names: get_capital | capital_of | country_info
about: Capital of a country. | Facts about a country.
slots: country,name,land=city
asks: What is the capital of {country}? | Which city is the capital of {country}?
result: capital=city
answers: The capital of {country} is {capital}. | {capital}.

names: create_ticket | open_issue | report_bug | new_ticket
about: Open a ticket. | Report a problem.
slots: title,summary,subject=text; priority,severity,level=enum low medium high urgent
asks: Open a ticket "{title}" with priority {priority}. | Report this as {priority}: {title} | File a {priority} issue: {title}
result: ticket=id
answers: The ticket is {ticket}. | I opened ticket {ticket}.

names: run_query | query_database | sql | find_records
about: Search records in a table. | Query the database.
slots: table,collection,source=word; column,field,key=word; value,equals,is=word
asks: Find {table} where {column} is {value}. | Search the table {table} for {column} {value} | Get all {table} with {column} = {value}
result: count=int
answers: There are {count} {table}. | I found {count}.

names: set_volume | volume | change_volume
about: Set the volume. | How loud it plays.
slots: level,volume,value,percent=int
asks: Set the volume to {level}. | Make it {level} percent loud | Volume {level} please
result: ok
answers: The volume is {level}. | I set it to {level}.

names: book_ticket | buy_tickets | reserve_seats
about: Buy tickets for a show. | Book seats.
slots: show,movie,event,title=title; count,tickets,seats,quantity=int; day,date,when=day
asks: Buy {count} tickets for {show} {on}{day}. | I want {count} seats for {show} {on}{day} | Book {count} tickets to see {show} {on}{day}.
result: code=id
answers: You have {count} tickets for {show}. The code is {code}. | Booked: {code}.
"""
SKIES = row("sunny cloudy rainy windy foggy clear snowy stormy")
UNITS = row("km miles meters feet inches cm kg pounds grams ounces liters gallons cups hours minutes seconds")
STATUSES = row("shipped delivered packed waiting cancelled late paid sent lost returned")
ROOMS = row("kitchen bedroom garage hall office garden bathroom attic cellar nursery")
VERBS = row(
    "get find set make check update remove count open close start stop list show print paint wash move copy "
    "rename send fetch load save pick plan draw mark lock unlock fill clean fix build measure test read store"
)
_MORE_TYPES = row("city person date time int number id item color flag word title text email language items")
_ABOUT = ("{Verb} the {thing}.", "{Verb} a {thing}.", "Use this to {verb} a {thing}.", "{verb} {thing}")
_NEEDS = (
    "{Verb} the {thing}",
    "Please {verb} the {thing}",
    "Can you {verb} the {thing}",
    "I want to {verb} the {thing}",
)
_WITH = (
    "with {key} {value}",
    "{key} {value}",
    "{key}: {value}",
    "where {key} is {value}",
    "with the {key} {value}",
)
_NATURAL = {
    **{
        "city": ("in {value}", "for {value}"),
        "person": ("for {value}", "of {value}"),
        "date": ("on {value}",),
    },
    **{
        "time": ("at {value}",),
        "color": ("in {value}",),
        "language": ("in {value}",),
        "int": ("{value} times",),
    },
}


@dataclass(frozen=True)
class Slot:
    keys: tuple[str, ...]
    type: str
    choices: tuple[str, ...]
    is_optional: bool


@dataclass(frozen=True)
class Family:
    names: tuple[str, ...]
    about: tuple[str, ...]
    slots: tuple[Slot, ...]
    asks: tuple[str, ...]
    result: tuple[tuple[str, str], ...]  # key (none: the value alone) and type; nothing: it only works
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """One offered function: the object that the model is shown, and by slot the key of its parameter."""

    family: Family
    name: str
    shown: dict[str, Any]
    keys: dict[str, str]
    types: dict[str, str]

    @property
    def is_calculator(self) -> bool:
        return any("sum" in slot.type for slot in self.family.slots) or self.family.names[0] in CALCULATORS


CALCULATORS = ("add", "multiply", "subtract", "calculate")


@dataclass(frozen=True)
class Use:
    """A wish for a function: the question, the arguments, a result and what to answer then."""

    function: Function
    ask: str
    arguments: dict[str, Any]
    result: str
    answer: str
    subject: str  # what the first argument was, for a follow-up


def _read(text: str) -> tuple[Family, ...]:
    found = []
    for block in text.strip().split("\n\n"):
        parts = dict(line.split(": ", 1) for line in block.split("\n"))
        lists = {key: tuple(p.strip() for p in value.split("|")) for key, value in parts.items()}
        slots = []
        for slot in parts["slots"].split("; "):
            keys, kind = slot.strip().split("=")
            type, *choices = kind.split()
            names = tuple(key.rstrip("?") for key in keys.split(","))
            slots.append(Slot(names, type, tuple(choices), "?" in keys))
        result = (
            ()
            if parts["result"] == "ok"
            else tuple(tuple(p.strip().split("=")) for p in parts["result"].split("; "))
        )
        found.append(
            Family(lists["names"], lists["about"], tuple(slots), lists["asks"], result, lists["answers"])
        )  # type: ignore[arg-type]
    return tuple(found)


KNOWN = _read(FAMILIES)


def _value(slot_type: str, choices: tuple[str, ...], world: World, rng: Random) -> Any:
    if slot_type == "enum":
        return rng.choice(choices)
    own = {
        **{
            "degrees": lambda: rng.randrange(-12, 39),
            "sky": lambda: rng.choice(SKIES),
            "unit": lambda: rng.choice(UNITS),
        },
        **{
            "status": lambda: rng.choice(STATUSES),
            "room": lambda: rng.choice((rng.choice(ROOMS), noun(world, rng))),
        },
        **{"place": lambda: rng.choice((f"the {noun(world, rng)}", MAKERS["city"](world, rng)))},
        **{
            "company": lambda: rng.choice((made_up(world, rng).capitalize(), made_up(world, rng).upper()[:4]))
        },
        **{"folder": lambda: rng.choice((noun(world, rng), f"/{noun(world, rng)}/{made_up(world, rng)}"))},
        **{"integer": lambda: rng.randrange(1, 1000)},
    }
    return own[slot_type]() if slot_type in own else MAKERS[slot_type](world, rng)


def invented(world: World, rng: Random) -> Family:
    """A function that nobody knows: some verb, some thing, some parameters."""
    while True:
        verb = rng.choice(VERBS) if rng.random() < 0.8 else rng.choice(world.words.known)
        if is_held_out_word(verb) == world.words.held_out or not world.words.held_out:
            break
    words = [noun(world, rng) for _ in range(rng.choice((1, 1, 2)))]
    thing, names = " ".join(words), "_".join((verb, *words))
    slots, phrases = [], []
    for type in rng.sample(_MORE_TYPES, rng.choices((0, 1, 2, 3), weights=(1, 5, 4, 2))[0]):
        choices: tuple[str, ...] = ()
        key = type if rng.random() < 0.4 and type not in ("int", "flag") else noun(world, rng)
        if rng.random() < 0.12:
            type, choices = "enum", tuple(dict.fromkeys(noun(world, rng) for _ in range(3)))
        if any(key in slot.keys for slot in slots):
            continue
        phrase = rng.choice(_NATURAL[type] if type in _NATURAL and rng.random() < 0.6 else _WITH)
        slots.append(Slot((key,), type, choices, False))
        phrases.append(phrase.replace("{value}", "{" + key + "}").replace("{key}", key))
    end = rng.choice((".", "", "?"))
    fill = {"verb": verb, "Verb": verb.capitalize(), "thing": thing}
    asks = tuple(" ".join([need.format(**fill), *phrases]) + end for need in _NEEDS)
    about = tuple(form.format(**fill) for form in _ABOUT)
    roll = rng.random()
    if roll < 0.4:
        return Family((names,), about, tuple(slots), asks, (), (f"Done: {verb} {thing}.", "It is done."))
    keys = list(dict.fromkeys(noun(world, rng) for _ in range(rng.choice((1, 1, 2, 3)))))
    result = tuple(
        (key, rng.choice(_MORE_TYPES)) for key in keys if all(key not in slot.keys for slot in slots)
    )
    answer = f"The {thing}: " + ", ".join(f"{key} {{{key}}}" for key, _ in result) + "."
    return Family((names,), about, tuple(slots), asks, result, (answer,) if result else ("It is done.",))


def offered(family: Family, world: World, rng: Random) -> Function:
    """The function as one program would declare it."""
    name = rng.choice(family.names)
    if "_" in name and rng.random() < 0.15:
        first, *rest = name.split("_")
        name = first + "".join(part.capitalize() for part in rest)
    keys, types, properties, required = {}, {}, {}, []
    says = rng.random()
    for slot in family.slots:
        key = slot.keys[0] if rng.random() < 0.4 else rng.choice(slot.keys)
        if key in properties:
            key = slot.keys[0]
        type = "large" if slot.type == "id" and rng.random() < 0.3 else slot.type
        keys[slot.keys[0]], types[slot.keys[0]] = key, type
        shown: dict[str, Any] = {"type": JSON_TYPES.get(type, "integer" if type == "degrees" else "string")}
        if shown["type"] == "integer" and rng.random() < 0.25:
            shown["type"] = "number"
        if slot.type == "enum":
            shown["enum"] = list(slot.choices)
        if slot.type == "items":
            shown["items"] = {"type": "string"}
        if says < 0.45:
            shown["description"] = rng.choice(
                (f"The {slot.keys[0].replace('_', ' ')}", f"the {key}", key.capitalize())
            )
        properties[key] = shown
        if not slot.is_optional:
            required.append(key)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    shown = {"name": name, "description": rng.choice(family.about), "parameters": parameters}
    return Function(family, name, shown, keys, types)


def use(function: Function, world: World, rng: Random, ask: str | None = None) -> Use:
    """A question that this function answers, in the family's words."""
    family = function.family
    form = ask or rng.choice(family.asks)
    values = {
        slot.keys[0]: _value(function.types[slot.keys[0]], slot.choices, world, rng)
        for slot in family.slots
        if f"{{{slot.keys[0]}}}" in form or not slot.is_optional
    }
    said = {key: in_words(value) for key, value in values.items()}
    found, result = _result(family, values, world, rng)
    fill = {**said, **found, "on": "", "Day": ""}
    if "day" in said:
        plain = said["day"] in ("today", "tomorrow") or said["day"].startswith("next")
        fill |= {
            "on": "" if plain else "on ",
            "Day": said["day"].capitalize() if plain else f"On {said['day']}",
        }
    arguments = {function.keys[key]: value for key, value in values.items()}
    subject = said.get(family.slots[0].keys[0], "") if family.slots else ""
    return Use(
        function, form.format(**fill), arguments, result, rng.choice(family.answers).format(**fill), subject
    )


def _result(family: Family, values: dict[str, Any], world: World, rng: Random) -> tuple[dict[str, str], str]:
    """The values that the answer names, and the text that the function gave."""
    if not family.result:
        return {}, rng.choice(("ok", "done", "true", '{"status": "ok"}', '{"ok": true}', "success", "null"))
    if family.result[0][0] == "":
        kind = family.result[0][1]
        if kind in ("sum", "product", "difference"):
            a, b = (values[slot.keys[0]] for slot in family.slots)
            value = round({"sum": a + b, "product": a * b, "difference": a - b}[kind], 4)
        else:
            value = _value(kind, (), world, rng)
        form = rng.choice(("{}", "{}", '{{"result": {}}}'))
        return {"result": in_words(value)}, form.format(
            value if not isinstance(value, str) or form == "{}" else dumps(value)
        )
    found = {key: _value(type, (), world, rng) for key, type in family.result}
    said = {key: in_words(value) for key, value in found.items()}
    if rng.random() < 0.7:
        return said, dumps(found, ensure_ascii=False)
    return said, rng.choice((", ", "\n", "; ")).join(f"{key}: {value}" for key, value in said.items())
