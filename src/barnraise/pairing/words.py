"""Word list of pairing codes: 256 plain English words, for all words of a code.

They are chosen so that one is not taken for another, spoken or typed. Any two differ by at least four
letters. The first four letters identify a word, so that joined words can be told apart.

Never change the list without a new version of the code: both machines must have the same words.
"""

from __future__ import annotations

PREFIX_LETTERS = 4

_TEXT = """
acrobat adventure airport anchor antelope apricot astronaut autumn avocado backpack badger bamboo
beehive biscuit blackbird blossom blueberry bookshelf boulder bracelet breakfast bronze buffalo
bulldozer butterfly cabbage cactus calendar captain caravan cathedral centipede champion charcoal
cheesecake chimney chipmunk chocolate cinnamon clockwork cobweb coconut compass corkscrew cricket
crocodile crossover crystal cucumber cupboard cushion daffodil dandelion dashboard dentist desert
detective diamond dinosaur dolphin domino donkey doorbell dragonfly drawbridge driftwood duckling dynamo
earthworm eclipse elephant elevator emerald eyebrow feather festival fiddle fingernail firefly fishbone
flamingo flashlight fountain freckle furnace galaxy gardener garlic gemstone giraffe glacier goldfish
gorilla granite greenhouse hailstorm hammock hamster handshake harmonica harvest hazelnut headlight
hedgehog helmet hexagon highway honeycomb horizon hotel hurricane hydrant iceberg inkwell island ivory
jackpot jaguar jellyfish journal jukebox juniper kangaroo kayak ketchup kilogram kingdom lantern
lemonade leopard lettuce library lighthouse locomotive lullaby marathon marigold matchbox melon
microscope mongoose moonlight motorcycle muffin museum mushroom mustard necklace newspaper nightfall
notebook nugget oatmeal ocean octopus olive orchard ostrich paintbrush pancake parachute parsley
passenger pavement peacock pebble pelican penguin peppermint photograph picnic pigeon pineapple pinwheel
pizza planet platypus popcorn porcupine potato pretzel pumpkin pyramid quicksand quilt rabbit racehorse
radish railway rainbow rattle reindeer rosemary rugby safari sailboat sandwich satellite saxophone
scarecrow scissors seagull seaweed shipyard shoelace skeleton skyscraper snowflake songbird spider
spinach spruce squirrel stadium starfish stopwatch strawberry submarine sunflower symphony tablecloth
tadpole tangerine teapot telescope thermostat thimble toothbrush tornado tortoise tractor trampoline
treasure triangle trombone trumpet tugboat tulip twilight umbrella underpass universe vampire vineyard
vitamin voyage waterfall wedding windmill wolfhound wombat woodland workshop yardstick zebra zodiac
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
