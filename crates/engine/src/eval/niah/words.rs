//! What keys are made of: an adjective and a noun, both everyday words of one meaning.

/// The first word of a key.
pub(super) const ADJECTIVES: [&str; 96] = [
    "amber", "ancient", "bitter", "blue", "bold", "brave", "bright", "broad", "broken", "calm",
    "careful", "cheerful", "clean", "clever", "cloudy", "cold", "crimson", "curious", "dark",
    "deep", "distant", "dry", "dusty", "eager", "early", "empty", "faint", "famous", "fast",
    "fierce", "foggy", "fresh", "frozen", "gentle", "giant", "golden", "grand", "green", "grey",
    "happy", "heavy", "hidden", "hollow", "honest", "humble", "hungry", "icy", "idle", "jolly",
    "kind", "large", "late", "lazy", "little", "lonely", "long", "loud", "lucky", "mellow",
    "mighty", "misty", "narrow", "noble", "orange", "pale", "patient", "polite", "proud", "purple",
    "quick", "quiet", "rainy", "rapid", "round", "rusty", "salty", "scarlet", "sharp", "shiny",
    "silent", "silver", "simple", "sleepy", "slow", "smooth", "snowy", "steady", "stormy", "sunny",
    "sweet", "tall", "tiny", "violet", "warm", "wild", "wooden",
];

/// The second word of a key.
pub(super) const NOUNS: [&str; 96] = [
    "anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "beetle", "bell",
    "blanket", "boat", "bottle", "bridge", "bucket", "button", "camel", "candle", "canyon",
    "carpet", "castle", "cherry", "circle", "cliff", "clock", "cloud", "compass", "copper",
    "cottage", "crane", "crown", "desert", "dolphin", "donkey", "drum", "eagle", "engine",
    "falcon", "feather", "fiddle", "flute", "forest", "fountain", "fox", "garden", "glacier",
    "guitar", "hammer", "harbor", "hedge", "helmet", "heron", "hill", "island", "jacket", "kettle",
    "ladder", "lantern", "lemon", "lion", "lizard", "magnet", "maple", "marble", "meadow",
    "mirror", "mountain", "needle", "ocean", "orchard", "otter", "paddle", "parrot", "pebble",
    "pepper", "piano", "pillow", "planet", "pumpkin", "rabbit", "river", "rocket", "saddle",
    "shovel", "sparrow", "spider", "statue", "summit", "teapot", "tiger", "tower", "tunnel",
    "turtle", "valley", "violin", "walnut", "window",
];
