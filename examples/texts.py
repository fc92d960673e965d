"""A small collection to search, and questions that share few words with their answers."""

from __future__ import annotations

TEXTS = [
    "Leaves catch sunlight and build sugar out of water and carbon dioxide.",
    "Roots hold a tree in the ground and drink for it.",
    "Bees carry pollen from blossom to blossom while they collect nectar.",
    "Mushrooms live on dead wood and give its minerals back to the soil.",
    "A caterpillar dissolves inside its cocoon and comes out with wings.",
    "Cats sleep for most of the day and hunt at dusk.",
    "Whales breathe air and have to surface every few minutes.",
    "Migrating birds find their way by the stars and the Earth's magnetic field.",
    "The heart pumps about five litres of blood through the body every minute.",
    "A fever helps the body fight germs, which dislike the heat.",
    "Vaccines show the immune system what an invader looks like before it arrives.",
    "Too little sleep weakens memory and makes people irritable.",
    "Brushing twice a day keeps the dentist away.",
    "Water boils at a lower temperature high up in the mountains.",
    "Salt lowers the freezing point of water, so it is strewn on icy roads.",
    "The Moon's gravity pulls the oceans towards it, and the shore floods twice a day.",
    "Lightning heats the air so fast that it explodes, which is the thunder we hear.",
    "Earthquakes happen where plates of the crust suddenly slip past each other.",
    "A rainbow appears when drops of water split sunlight into its colours.",
    "The Sun will swell into a red giant in about five billion years.",
    "Knead the dough for ten minutes and let it rise until it has doubled.",
    "Rest the meat before you carve it, or the juices run out on the board.",
    "Roast coffee beans lose their aroma within weeks once the bag is open.",
    "Onions make you cry because cutting them frees a gas that stings the eyes.",
    "The printing press made books cheap and spread new ideas across Europe.",
    "Roman aqueducts brought fresh water into the city over many miles.",
    "The Silk Road carried goods and beliefs between China and the Mediterranean.",
    "A compound interest account pays interest on the interest of earlier years.",
    "Diversify: do not put all of your savings into a single company.",
    "Inflation means that the same banknote buys less every year.",
    "Use a different password for every account, and let a manager remember them.",
    "Back up your files to a second place before the disk fails, not after.",
    "A unit test checks one small piece of a program by itself.",
    "An index lets a database find a row without reading the whole table.",
    "Trains are quieter and use far less energy per passenger than planes.",
    "Check the tyres and the brakes before a long bicycle trip.",
]

QUESTIONS = [
    "How do plants make their own food?",
    "Why is there high tide and low tide?",
    "My query is slow, what can I do?",
    "How should I invest my money?",
]


def show(question: str, hits: list[tuple[float, str]]) -> None:
    """Print what was found, best first."""
    print(f"\n{question}")
    for score, text in hits:
        print(f"  {score:.2f}  {text}")
