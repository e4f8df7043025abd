/** Sentences and words to start with. */

export const PAIRS = [
  { name: "German", src: "Mein Onkel kommt nächsten Montag aus Amerika zurück.", tgt: "My uncle comes back from America next Monday." },
  { name: "French", src: "Elle a acheté une petite maison blanche près de la mer.", tgt: "She bought a small white house near the sea." },
  { name: "Arabic", src: "القطة السوداء تنام على الكرسي.", tgt: "The black cat sleeps on the chair." },
  { name: "Urdu", src: "میرا بھائی ہر صبح اخبار پڑھتا ہے۔", tgt: "My brother reads the newspaper every morning." },
  { name: "Farsi", src: "من هر روز با قطار به مدرسه می‌روم.", tgt: "I go to school by train every day." },
  { name: "Hindi", src: "मेरी बहन हर दिन पार्क में दौड़ती है।", tgt: "My sister runs in the park every day." },
  { name: "Turkish", src: "Yarın sabah erkenden yola çıkacağız.", tgt: "We will leave early tomorrow morning." },
];

export const BITEXT = [
  "Das rote Haus ist alt. ||| The red house is old.",
  "Ich habe gestern einen Brief geschrieben. ||| I wrote a letter yesterday.",
  "Il ne mange jamais de viande. ||| He never eats meat.",
  "La biblioteca abre a las nueve. ||| The library opens at nine.",
].join("\n");

export const QUERIES = [
  { name: "Weather", text: "It rained a lot yesterday." },
  { name: "Food", text: "What shall we eat for lunch?" },
  { name: "German", text: "Der Zug nach Berlin fährt um acht Uhr ab." },
  { name: "Spanish", text: "Mi hermano trabaja en un hospital." },
];

const SENTENCES = {
  en: ["Good morning!", "Where is the station?", "I am very tired.", "The soup is too hot.", "She is reading a book."],
  de: ["Guten Morgen!", "Wo ist der Bahnhof?", "Ich bin sehr müde.", "Die Suppe ist zu heiß.", "Sie liest ein Buch."],
  fr: ["Bonjour !", "Où est la gare ?", "Je suis très fatigué.", "La soupe est trop chaude.", "Elle lit un livre."],
  tr: ["Günaydın!", "İstasyon nerede?", "Çok yorgunum.", "Çorba çok sıcak.", "O bir kitap okuyor."],
  ru: ["Доброе утро!", "Где вокзал?", "Я очень устал.", "Суп слишком горячий.", "Она читает книгу."],
  ar: ["صباح الخير!", "أين المحطة؟", "أنا متعب جدا.", "الحساء ساخن جدا.", "هي تقرأ كتابا."],
};

const WORDS = {
  en: ["water", "fire", "bread", "mother", "father", "Monday", "red", "seven"],
  de: ["Wasser", "Feuer", "Brot", "Mutter", "Vater", "Montag", "rot", "sieben"],
  es: ["agua", "fuego", "pan", "madre", "padre", "lunes", "rojo", "siete"],
  ru: ["вода", "огонь", "хлеб", "мать", "отец", "понедельник", "красный", "семь"],
  hi: ["पानी", "आग", "रोटी", "माँ", "पिता", "सोमवार", "लाल", "सात"],
};

export const ENGLISH_WORDS = ["water", "house", "mother", "red", "seven"].map((word) => ({ name: word }));

export const TRANSLATIONS = [
  { name: "Greeting", text: "Good morning!" },
  { name: "Two sentences", text: "Our guests will arrive in a few minutes.\nThe university has a cafeteria." },
];

/** Return lines of language, tab and text. */
function toLines(byLanguage) {
  return Object.entries(byLanguage)
    .flatMap(([language, texts]) => texts.map((text) => `${language}\t${text}`))
    .join("\n");
}

export const SPACES = [
  { name: "Sentences", unit: "sentence", text: toLines(SENTENCES) },
  { name: "Words", unit: "word", text: toLines(WORDS) },
];
