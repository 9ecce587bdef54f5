// Random lives of texts in a small suffix index, for sanitizers: what is proposed must have stood in a text of the
// same partition, or in the text itself.
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <vector>

extern "C" {
void* tm_suffix_new(uint32_t pages, uint32_t bits);
void tm_suffix_delete(void* index);
uint32_t tm_suffix_pages_in_use(const void* index);
void tm_suffix_open(void* index, uint32_t id, uint64_t partition);
void tm_suffix_close(void* index, uint32_t id);
void tm_suffix_forget(void* index, uint64_t partition);
void tm_suffix_append(void* index, uint32_t texts, const uint32_t* ids, const uint32_t* counts, const int32_t* tokens, int32_t answer);
void tm_suffix_propose(void* index, uint32_t texts, const uint32_t* ids, uint32_t width, int32_t* out, uint32_t* counts, uint32_t* facts);
}

int main() {
    std::mt19937 random(7);
    const auto draw = [&](uint32_t below) { return uint32_t(random() % below); };
    for (int life = 0; life < 20; ++life) {
        const uint32_t pages = 1 + draw(12);
        void* index = tm_suffix_new(pages, 4 + draw(6));
        std::map<uint32_t, uint32_t> open;  // text -> partition
        uint32_t next = 1;
        for (int turn = 0; turn < 20000; ++turn) {
            const uint32_t what = draw(20);
            if (open.size() < 2 || (what == 0 && open.size() < 12)) {
                open[next] = draw(3);
                tm_suffix_open(index, next, open[next]);
                ++next;
                continue;
            }
            auto one = open.begin();
            std::advance(one, draw(uint32_t(open.size())));
            if (what == 1) {
                tm_suffix_close(index, one->first);
                open.erase(one);
            } else if (what == 2 && draw(10) == 0) {
                tm_suffix_forget(index, one->second);
            } else if (what < 12) {
                // every partition has tokens of its own, so that a leak shows
                std::vector<int32_t> tokens(1 + draw(90));
                for (int32_t& token : tokens) token = int32_t(1000 * one->second + draw(4));
                const uint32_t count = uint32_t(tokens.size());
                tm_suffix_append(index, 1, &one->first, &count, tokens.data(), int32_t(draw(2)));
            } else {
                std::vector<uint32_t> ids;
                for (const auto& [id, partition] : open) ids.push_back(id);
                ids.push_back(0);  // nobody
                const uint32_t width = 1 + draw(40), texts = uint32_t(ids.size());
                std::vector<int32_t> out(texts * width, -1);
                std::vector<uint32_t> counts(texts), facts(4 * texts);
                tm_suffix_propose(index, texts, ids.data(), width, out.data(), counts.data(), facts.data());
                for (uint32_t i = 0; i < texts; ++i) {
                    if (counts[i] > width || (ids[i] == 0 && counts[i])) return std::printf("too many\n"), 1;
                    for (uint32_t j = 0; j < counts[i]; ++j)
                        if (uint32_t(out[i * width + j]) / 1000 != open[ids[i]]) return std::printf("a leak\n"), 1;
                }
            }
            if (tm_suffix_pages_in_use(index) > pages) return std::printf("too many pages\n"), 1;
        }
        tm_suffix_delete(index);
    }
    std::printf("ok\n");
    return 0;
}
