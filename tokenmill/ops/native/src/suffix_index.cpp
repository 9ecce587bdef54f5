// Suffix index: where the last tokens of a text stood before, and what followed there (drafts for speculative decoding).
//
// Texts lie in pages of a fixed number of tokens; when all pages are taken, the oldest is given up. Hashes of the last
// n tokens, for several n, lead to the two newest places that had the same hash; what stands there is compared, so a
// collision or a page that was given up costs a draft and nothing else. A text finds itself and the answers of its own
// partition (a tenant's cache salt), never a prompt of another text.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint32_t PAGE = 64;    // tokens
constexpr uint32_t WINDOW = 32;  // of a text's newest tokens: the longest match that is told from longer ones
constexpr uint32_t NONE = 0xffffffff;
constexpr int ORDERS[] = {16, 10, 6, 4, 3, 2};  // longest first
constexpr int NUM_ORDERS = sizeof(ORDERS) / sizeof(ORDERS[0]);

struct Page {
    uint32_t owner = 0;  // 0: free
    uint32_t number = 0;  // within its text
    uint32_t next = NONE, previous = NONE;  // of its text, where these are still its text's
    uint32_t used = 0;
    bool answer = false;
    uint64_t partition = 0;
};

struct Text {
    uint64_t partition = 0;
    uint32_t last = NONE;  // page
    uint32_t pages = 0;
    uint64_t length = 0;
    int32_t recent[WINDOW];  // newest at (length - 1) % WINDOW
};

struct Slot {
    uint32_t tag, behind;  // one more than the place; 0: free
};

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

// Of zeros, which the system gives page by page as they are first written: an index that is hardly used takes hardly
// any memory, and no time to make.
template <typename T>
std::unique_ptr<T[], Free> zeros(size_t count) {
    T* memory = static_cast<T*>(std::calloc(count, sizeof(T)));
    if (!memory) throw std::bad_alloc();
    return std::unique_ptr<T[], Free>(memory);
}

struct Found {
    uint32_t place = NONE;
    uint32_t length = 0;
};

inline uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0x9fb21c651e98df25ull;
    h ^= h >> 29;
    return h;
}

class Index {
   public:
    Index(uint32_t pages, uint32_t bits) : pages_(pages), tokens_(zeros<int32_t>(size_t(pages) * PAGE)), slots_(zeros<Slot>(size_t(2) << bits)), mask_((uint64_t(1) << bits) - 1) {
        for (uint32_t page = pages; page-- > 0;) free_.push_back(page);
    }

    void open(uint32_t id, uint64_t partition) {
        Text& text = texts_[id];
        text = Text();
        text.partition = partition;
    }

    void append(uint32_t id, const int32_t* tokens, uint32_t count, bool answer) {
        const auto found = texts_.find(id);
        if (found == texts_.end()) return;
        for (uint32_t i = 0; i < count; ++i) append(id, found->second, tokens[i], answer);
    }

    // The text is complete: its answer may be found by others of its partition, its prompt is given up.
    void close(uint32_t id) {
        const auto found = texts_.find(id);
        if (found == texts_.end()) return;
        for (uint32_t at = found->second.last, left = found->second.pages; at != NONE && left && pages_[at].owner == id; --left) {
            const uint32_t before = previous(at);
            if (!pages_[at].answer) give_up(at);
            at = before;
        }
        texts_.erase(found);
    }

    void forget(uint64_t partition) {
        for (uint32_t page = 0; page < pages_.size(); ++page)
            if (pages_[page].owner && pages_[page].partition == partition) {
                std::memset(&tokens_[size_t(page) * PAGE], 0, PAGE * sizeof(int32_t));
                give_up(page);
            }
        for (auto& [id, text] : texts_)
            if (text.partition == partition) {
                text.last = NONE;
                text.length = 0;  // what it said before is not to be matched any more
            }
    }

    // How the text may go on: at most `limit` tokens. Says how many tokens before them are the same there, whether it
    // is the text itself, and of how many places that were looked at how many go on with the same token.
    uint32_t propose(uint32_t id, uint32_t limit, int32_t* out, uint32_t* facts) const {
        std::memset(facts, 0, 4 * sizeof(uint32_t));
        const auto known = texts_.find(id);
        if (known == texts_.end() || known->second.length < 2) return 0;
        const Text& text = known->second;
        uint64_t own[NUM_ORDERS], others[NUM_ORDERS];
        hashes(text, own_seed(id), own);
        hashes(text, text.partition, others);
        for (int order = 0; order < NUM_ORDERS; ++order) {
            Found seen[4];
            uint32_t count = 0;
            if (text.length < uint64_t(ORDERS[order])) continue;
            for (const uint64_t hash : {own[order], others[order]}) {
                const Slot* bucket = &slots_[2 * (hash & mask_)];
                for (int way = 0; way < 2; ++way)
                    if (bucket[way].behind && bucket[way].tag == uint32_t(hash >> 32)) look(id, text, bucket[way].behind - 1, seen, count);
            }
            if (!count) continue;
            uint32_t best = 0;
            for (uint32_t i = 1; i < count; ++i)
                if (seen[i].length > seen[best].length) best = i;
            const int32_t first = tokens_[after(seen[best].place)];
            uint32_t same = 0;
            for (uint32_t i = 0; i < count; ++i) same += tokens_[after(seen[i].place)] == first;
            facts[0] = seen[best].length;
            facts[1] = pages_[seen[best].place / PAGE].owner == id;
            facts[2] = same;
            facts[3] = count;
            uint32_t made = 0, last = seen[best].place;
            for (uint32_t at = after(last); at != NONE && made < limit; at = after(at)) out[made++] = tokens_[last = at];
            if (last == text.last * PAGE + pages_[text.last].used - 1)  // the text's own end: it goes round
                for (const uint32_t round = made; made < limit; ++made) out[made] = out[made - round];
            return made;
        }
        return 0;
    }

    uint32_t pages_in_use() const { return uint32_t(pages_.size() - free_.size()); }

   private:
    static uint64_t own_seed(uint32_t id) { return mix(0x5851f42d4c957f2dull + id); }

    // One hash per order, of the newest tokens, newest first.
    static void hashes(const Text& text, uint64_t seed, uint64_t* out) {
        uint64_t h = mix(seed ^ 0x2545f4914f6cdd1dull);
        int order = NUM_ORDERS - 1;
        for (int n = 1; n <= ORDERS[0] && uint64_t(n) <= text.length; ++n) {
            h = mix((h ^ uint32_t(text.recent[(text.length - n) % WINDOW])) * 0xd6e8feb86659fd93ull);
            if (n == ORDERS[order]) {
                out[order] = mix(h + uint64_t(n));
                if (order-- == 0) break;
            }
        }
    }

    void append(uint32_t id, Text& text, int32_t token, bool answer) {
        uint32_t place = NONE;  // of the token before
        if (text.last != NONE && pages_[text.last].owner == id && text.length) place = text.last * PAGE + pages_[text.last].used - 1;
        if (place == NONE || pages_[text.last].used == PAGE || pages_[text.last].answer != answer) {
            const uint32_t page = take();
            const bool follows = place != NONE && text.last != page;
            if (!follows) place = NONE;
            pages_[page] = {id, text.pages++, NONE, follows ? text.last : NONE, 0, answer, text.partition};
            if (follows) pages_[text.last].next = page;
            text.last = page;
        }
        tokens_[size_t(text.last) * PAGE + pages_[text.last].used++] = token;
        if (place != NONE && text.length >= 2) {  // a place is listed once it is known what follows it
            uint64_t found[NUM_ORDERS];
            list(text, own_seed(id), place, found);
            if (pages_[place / PAGE].answer) list(text, text.partition, place, found);
        }
        text.recent[text.length++ % WINDOW] = token;
    }

    void list(const Text& text, uint64_t seed, uint32_t place, uint64_t* found) {
        hashes(text, seed, found);
        for (int order = 0; order < NUM_ORDERS; ++order) {
            if (text.length < uint64_t(ORDERS[order])) continue;
            Slot* bucket = &slots_[2 * (found[order] & mask_)];
            bucket[1] = bucket[0];  // the newest first
            bucket[0] = {uint32_t(found[order] >> 32), place + 1};
        }
    }

    // Adds the place to those seen, if the text's newest tokens really stand there and something follows.
    void look(uint32_t id, const Text& text, uint32_t place, Found* seen, uint32_t& count) const {
        const Page& page = pages_[place / PAGE];
        if (!page.owner || (page.owner != id && !(page.answer && page.partition == text.partition))) return;
        if (place % PAGE >= page.used || after(place) == NONE) return;
        for (uint32_t i = 0; i < count; ++i)
            if (seen[i].place == place) return;
        uint32_t length = 0;
        for (uint32_t at = place; at != NONE && length < WINDOW && length < text.length; at = before(at), ++length)
            if (tokens_[at] != text.recent[(text.length - 1 - length) % WINDOW]) break;
        if (length >= 2) seen[count++] = {place, length};
    }

    uint32_t after(uint32_t place) const {
        const Page& page = pages_[place / PAGE];
        if (place % PAGE + 1 < page.used) return place + 1;
        if (page.next == NONE) return NONE;
        const Page& next = pages_[page.next];
        return next.owner == page.owner && next.number == page.number + 1 && next.used ? page.next * PAGE : NONE;
    }

    uint32_t before(uint32_t place) const {
        if (place % PAGE) return place - 1;
        const uint32_t page = previous(place / PAGE);
        return page == NONE ? NONE : page * PAGE + pages_[page].used - 1;
    }

    uint32_t previous(uint32_t page) const {
        const uint32_t before = pages_[page].previous;
        if (before == NONE || pages_[before].owner != pages_[page].owner || pages_[before].number + 1 != pages_[page].number) return NONE;
        return before;
    }

    uint32_t take() {
        if (!free_.empty()) {
            const uint32_t page = free_.back();
            free_.pop_back();
            return page;
        }
        const uint32_t page = hand_;  // pages are first taken in this order, so it is about the oldest
        hand_ = (hand_ + 1) % uint32_t(pages_.size());
        return page;
    }

    void give_up(uint32_t page) {
        pages_[page] = Page();
        free_.push_back(page);
    }

    std::vector<Page> pages_;
    std::unique_ptr<int32_t[], Free> tokens_;
    std::unique_ptr<Slot[], Free> slots_;
    uint64_t mask_;
    std::vector<uint32_t> free_;
    uint32_t hand_ = 0;
    std::unordered_map<uint32_t, Text> texts_;
};

Index* of(void* index) { return static_cast<Index*>(index); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* tm_suffix_new(uint32_t pages, uint32_t bits) {
    try {
        return new Index(pages, bits);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void tm_suffix_delete(void* index) { delete of(index); }
uint32_t tm_suffix_page() { return PAGE; }
uint32_t tm_suffix_pages_in_use(const void* index) { return static_cast<const Index*>(index)->pages_in_use(); }
void tm_suffix_open(void* index, uint32_t id, uint64_t partition) { of(index)->open(id, partition); }
void tm_suffix_close(void* index, uint32_t id) { of(index)->close(id); }
void tm_suffix_forget(void* index, uint64_t partition) { of(index)->forget(partition); }

// `tokens` holds what each of the texts gains, one after the other.
void tm_suffix_append(void* index, uint32_t texts, const uint32_t* ids, const uint32_t* counts, const int32_t* tokens, int32_t answer) {
    for (uint32_t i = 0; i < texts; tokens += counts[i++]) of(index)->append(ids[i], tokens, counts[i], answer != 0);
}

// Of every text: out [texts, width] tokens, counts [texts], facts [texts, 4].
void tm_suffix_propose(void* index, uint32_t texts, const uint32_t* ids, uint32_t width, int32_t* out, uint32_t* counts, uint32_t* facts) {
    for (uint32_t i = 0; i < texts; ++i) counts[i] = of(index)->propose(ids[i], width, out + size_t(i) * width, facts + size_t(i) * 4);
}
}
#pragma GCC visibility pop
