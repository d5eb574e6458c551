"""The names that people give a language, and the code that the kit gives it.

One line a language: its ISO 639-1 code (three letters where it has none), its other codes of ISO
639-2 and 639-3 and older ones, then its names in English and, where Unicode's CLDR knows it, in the
language itself.
"""

import difflib
import functools
import re
import unicodedata

_TABLE = """
aa aar: Afar, Qafar
ab abk: Abkhazian, Аԥсшәа
ae ave: Avestan
af afr: Afrikaans
ak aka: Akan
am amh: Amharic, አማርኛ
an arg: Aragonese, aragonés
ar ara arb: Arabic, العربية
as asm: Assamese, অসমীয়া
av ava: Avaric, Avar
ay aym: Aymara
az aze azj: Azerbaijani, azərbaycan
ba bak: Bashkir, башҡорт теле
be bel: Belarusian, Byelorussian, беларуская
bg bul: Bulgarian, български
bh bih: Bihari
bi bis: Bislama
bm bam: Bambara, bamanakan
bn ben: Bengali, Bangla, বাংলা
bo bod tib: Tibetan, བོད་སྐད་
br bre: Breton, brezhoneg
bs bos: Bosnian, bosanski
ca cat: Catalan, Valencian, català
ce che: Chechen, нохчийн
ceb: Cebuano
ch cha: Chamorro
co cos: Corsican, corsu
cr cre: Cree
cs ces cze: Czech, čeština
cu chu: Church Slavic, Old Church Slavonic, церковнослове́нскїй
cv chv: Chuvash, чӑваш
cy cym wel: Welsh, Cymraeg
da dan: Danish, dansk
de deu ger: German, Deutsch
dv div: Divehi, Dhivehi, Maldivian, ދިވެހިބަސް
dz dzo: Dzongkha, རྫོང་ཁ
ee ewe: Ewe, eʋegbe
el ell gre: Greek, Modern Greek, Ελληνικά
en eng: English
eo epo: Esperanto
es spa: Spanish, Castilian, español
et est ekk: Estonian, eesti
eu eus baq: Basque, euskara
fa fas per pes: Persian, Farsi, فارسی
ff ful: Fulah, Fula, Fulani, Pulaar
fi fin: Finnish, suomi
fil: Filipino
fj fij: Fijian
fo fao: Faroese, føroyskt
fr fra fre: French, français
fy fry: Western Frisian, Frisian, Frysk
ga gle: Irish, Irish Gaelic, Gaeilge
gd gla: Scottish Gaelic, Gaelic, Gàidhlig
gez: Ge'ez
gl glg: Galician, galego
gn grn: Guarani, avañe’ẽ
gu guj: Gujarati, ગુજરાતી
gv glv: Manx, Gaelg
ha hau: Hausa
haw: Hawaiian
he heb iw: Hebrew, עברית
hi hin: Hindi, हिन्दी
ho hmo: Hiri Motu
hr hrv scr: Croatian, hrvatski
ht hat: Haitian, Haitian Creole, Kreyòl Ayisyen
hu hun: Hungarian, magyar
hy hye arm: Armenian, հայերեն
hz her: Herero
ia ina: Interlingua
id ind in: Indonesian, Indonesia
ie ile: Interlingue, Occidental
ig ibo: Igbo
ii iii: Sichuan Yi, Nuosu, ꆈꌠꉙ
ik ipk: Inupiaq
io ido: Ido
is isl ice: Icelandic, íslenska
it ita: Italian, italiano
iu iku: Inuktitut, ᐃᓄᒃᑎᑐᑦ
ja jpn: Japanese, 日本語
jv jav jw: Javanese, Jawa
ka kat geo: Georgian, ქართული
kg kon: Kongo
ki kik: Kikuyu, Gikuyu
kj kua: Kuanyama, Kwanyama
kk kaz: Kazakh, қазақ тілі
kl kal: Kalaallisut, Greenlandic
km khm: Khmer, Central Khmer, Cambodian, ខ្មែរ
kn kan: Kannada, ಕನ್ನಡ
ko kor: Korean, 한국어
kr kau: Kanuri
ks kas: Kashmiri, کٲشُر
ku kur: Kurdish, kurdî (kurmancî)
kv kom: Komi
kw cor: Cornish, kernewek
ky kir: Kirghiz, Kyrgyz, кыргызча
la lat: Latin, Latina
lb ltz: Luxembourgish, Letzeburgesch, Lëtzebuergesch
lg lug: Ganda, Luganda
li lim: Limburgan, Limburger, Limburgish
ln lin: Lingala, lingála
lo lao: Lao, ລາວ
lt lit: Lithuanian, lietuvių
lu lub: Luba-Katanga, Tshiluba
lv lav lvs: Latvian, latviešu
mg mlg plt: Malagasy
mh mah: Marshallese
mi mri mao: Maori, Māori
mk mkd mac: Macedonian, македонски
ml mal: Malayalam, മലയാളം
mn mon khk: Mongolian, монгол
mr mar: Marathi, मराठी
ms msa may zsm: Malay, Melayu
mt mlt: Maltese, Malti
my mya bur: Burmese, Myanmar, မြန်မာ
na nau: Nauru
nb nob: Norwegian Bokmål, Bokmål, norsk bokmål
nd nde: North Ndebele, isiNdebele
ne nep npi: Nepali, नेपाली
ng ndo: Ndonga
nl nld dut: Dutch, Flemish, Nederlands
nn nno: Norwegian Nynorsk, Nynorsk, norsk nynorsk
no nor: Norwegian, norsk
nr nbl: South Ndebele, isiNdebele
nv nav: Navajo, Navaho, Diné Bizaad
ny nya: Chichewa, Chewa, Nyanja
oc oci: Occitan, Provençal
oj oji: Ojibwa
om orm gaz: Oromo, Afaan Oromo, Oromoo
or ori ory: Oriya, Odia, ଓଡ଼ିଆ
os oss: Ossetian, Ossetic, ирон
pa pan: Panjabi, Punjabi, ਪੰਜਾਬੀ
pi pli: Pali
pl pol: Polish, polski
ps pus: Pushto, Pashto, پښتو
pt por: Portuguese, português
qu que: Quechua, Runasimi
rm roh: Romansh, rumantsch
rn run: Rundi, Kirundi, Ikirundi
ro ron rum mol mo: Romanian, Moldavian, Moldovan, română
ru rus: Russian, русский
rw kin: Kinyarwanda, Ikinyarwanda
sa san: Sanskrit, संस्कृत भाषा
sc srd: Sardinian, sardu
sd snd: Sindhi, سنڌي
se sme: Northern Sami, davvisámegiella
sg sag: Sango, Sängö
si sin: Sinhala, Sinhalese, සිංහල
sid: Sidamo
sk slk slo: Slovak, slovenčina
sl slv: Slovenian, Slovene, slovenščina
sm smo: Samoan
sn sna: Shona, chiShona
so som: Somali, Soomaali
sq sqi alb als: Albanian, shqip
sr srp scc: Serbian, српски
ss ssw: Swati, siSwati
st sot: Southern Sotho, Sotho, Sesotho
su sun: Sundanese, Basa Sunda
sv swe: Swedish, svenska
sw swa swh: Swahili, Kiswahili
ta tam: Tamil, தமிழ்
te tel: Telugu, తెలుగు
tg tgk: Tajik, тоҷикӣ
th tha: Thai, ไทย
ti tir: Tigrinya, Tigrigna, ትግርኛ
tig: Tigre
tk tuk: Turkmen, türkmen dili
tl tgl: Tagalog
tn tsn: Tswana, Setswana
to ton: Tonga, Tongan, lea fakatonga
tr tur: Turkish, Türkçe
ts tso: Tsonga, Xitsonga
tt tat: Tatar, татар
tw twi: Twi
ty tah: Tahitian
ug uig: Uighur, Uyghur, ئۇيغۇرچە
uk ukr: Ukrainian, українська
ur urd: Urdu, اردو
uz uzb uzn: Uzbek, o‘zbek
ve ven: Venda, Tshivenḓa
vi vie: Vietnamese, Tiếng Việt
vo vol: Volapük
wa wln: Walloon, walon
wal: Wolaytta
wo wol: Wolof
xh xho: Xhosa, isiXhosa
yi yid ydd ji: Yiddish, ייִדיש
yo yor: Yoruba, Èdè Yorùbá
yue: Cantonese
za zha: Zhuang, Chuang, Vahcuengh
zh zho chi cmn: Chinese, Mandarin, 中文
zu zul: Zulu, isiZulu
"""


@functools.cache
def codes_by_name() -> dict[str, str]:
    """The kit's code by every code and name of a language, names without capitals and accents."""
    known = {}
    for line in _TABLE.strip().splitlines():
        codes, names = line.split(": ")
        code, *others = codes.split()
        for name in (code, *others, *map(plain_name, names.split(", "))):
            known.setdefault(name, code)
    return known


def plain_name(name: str) -> str:
    """`name` as names are compared: lower case, no accents or apostrophes, single spaces."""
    letters = unicodedata.normalize("NFD", name.casefold())
    kept = "".join(c for c in letters if not unicodedata.combining(c) and c not in "'’‘`")
    return " ".join(filter(None, re.split("[ _-]", kept)))


def similar_language(name: str) -> str:
    """' Did you mean `english` (en)?' where a known code or name resembles `name`, else ""."""
    known = codes_by_name()
    close = difflib.get_close_matches(plain_name(name[:80]), known, n=1)
    return f" Did you mean `{close[0]}` ({known[close[0]]})?" if close else ""
