/* The suffix automaton of `proposers/ngram_index.py`, state for state: see there what it is.

   A state with one transition holds it itself; those of the others are in one hash table, and in a
   list by state, from which a split copies them. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MANY = -1, NOWHERE = -1, LEAST_SLOTS = 64 };
static const int64_t ONE = (int64_t)1 << 32, PLACE = ((int64_t)1 << 32) - 1;
static const int64_t FULL = (int64_t)64 << 32; /* MOST_COUNTED */

typedef struct {
    int64_t rank;
    int32_t link, length;
    int32_t only_token, only_state; /* 0: no transition, MANY: `edges` is the last of several */
    int32_t edges;
} State;

typedef struct {
    int32_t state, token, to, next;
} Edge;

typedef struct {
    int32_t *token;
    State *state;
    Edge *edge;
    int32_t *slot; /* edges by hash, NOWHERE: free */
    int64_t tokens, states, edges, most_tokens, most_states, most_edges, slots;
    int32_t last, match_tokens, match_end;
} Index;

/* Make room for one more; 0 where there is no memory. */
static int grow(void **array, int64_t count, int64_t *most, size_t size) {
    if (count < *most) return 1;
    int64_t more = *most * 2;
    void *grown = realloc(*array, more * size);
    if (!grown) return 0;
    *array = grown, *most = more;
    return 1;
}

static int64_t slot_of(const Index *x, int32_t state, int32_t token) {
    uint64_t h = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    int64_t at = (h ^ h >> 32) & (x->slots - 1);
    while (x->slot[at] != NOWHERE) {
        const Edge *e = x->edge + x->slot[at];
        if (e->state == state && e->token == token) break;
        at = (at + 1) & (x->slots - 1);
    }
    return at;
}

static int rehash(Index *x) {
    int32_t *slot = malloc(x->slots * 2 * sizeof *slot);
    if (!slot) return 0;
    free(x->slot);
    x->slot = slot, x->slots *= 2;
    memset(slot, NOWHERE, x->slots * sizeof *slot);
    for (int64_t i = 0; i < x->edges; i++)
        slot[slot_of(x, x->edge[i].state, x->edge[i].token)] = i;
    return 1;
}

/* A transition that a state of several has not got yet. */
static int add_edge(Index *x, int32_t state, int32_t token, int32_t to) {
    if (x->edges * 2 >= x->slots && !rehash(x)) return 0;
    if (!grow((void **)&x->edge, x->edges, &x->most_edges, sizeof *x->edge)) return 0;
    State *s = x->state + state;
    x->edge[x->edges] = (Edge){state, token, to, s->edges};
    x->slot[slot_of(x, state, token)] = s->edges = x->edges;
    x->edges++;
    return 1;
}

static int32_t add_state(Index *x, int32_t length, int64_t rank) {
    if (!grow((void **)&x->state, x->states, &x->most_states, sizeof *x->state)) return NOWHERE;
    x->state[x->states] = (State){rank, 0, length, 0, 0, NOWHERE};
    return x->states++;
}

/* Where a token's transition is kept; NULL: there is none. */
static int32_t *next_of(Index *x, int32_t state, int32_t token) {
    State *s = x->state + state;
    if (s->only_state != MANY)
        return s->only_state && s->only_token == token ? &s->only_state : NULL;
    int32_t edge = x->slot[slot_of(x, state, token)];
    return edge == NOWHERE ? NULL : &x->edge[edge].to;
}

static int set_next(Index *x, int32_t state, int32_t token, int32_t to) {
    State *s = x->state + state;
    if (!s->only_state) {
        s->only_token = token, s->only_state = to;
        return 1;
    }
    if (s->only_state != MANY) {
        int32_t first = s->only_state;
        s->only_state = MANY;
        if (!add_edge(x, state, s->only_token, first)) return 0;
    }
    return add_edge(x, state, token, to);
}

/* Give the shorter strings of `seen`, to which token leads from `walk`, their own state. */
static int32_t split(Index *x, int32_t seen, int32_t walk, int32_t token) {
    int32_t clone = add_state(x, x->state[walk].length + 1, x->state[seen].rank);
    if (clone == NOWHERE) return NOWHERE;
    State *from = x->state + seen, *to = x->state + clone;
    to->only_token = from->only_token, to->only_state = from->only_state;
    for (int32_t e = from->edges; e != NOWHERE; e = x->edge[e].next)
        if (!add_edge(x, clone, x->edge[e].token, x->edge[e].to)) return NOWHERE;
    to->link = from->link;
    from->link = clone;
    for (int32_t *held; walk >= 0; walk = x->state[walk].link) {
        held = next_of(x, walk, token);
        if (!held || *held != seen) break;
        *held = clone;
    }
    return clone;
}

static int append(Index *x, int32_t token) {
    int64_t position = x->tokens;
    if (!grow((void **)&x->token, x->tokens, &x->most_tokens, sizeof *x->token)) return 0;
    x->token[x->tokens++] = token;
    int32_t state = add_state(x, position + 1, ONE + position);
    if (state == NOWHERE) return 0;
    int32_t walk = x->last, seen = 0;
    for (; walk >= 0; walk = x->state[walk].link) {
        const int32_t *held = next_of(x, walk, token);
        if (held) {
            seen = *held;
            break;
        }
        if (!set_next(x, walk, token, state)) return 0;
    }
    x->last = state;
    if (seen && x->state[seen].length != x->state[walk].length + 1) {
        seen = split(x, seen, walk, token);
        if (seen == NOWHERE) return 0;
    }
    x->state[state].link = seen;
    x->match_tokens = x->state[seen].length;
    x->match_end = x->state[seen].rank & PLACE;
    x->state[seen].rank += position - x->match_end;
    for (; x->state[seen].rank < FULL; seen = x->state[seen].link) x->state[seen].rank += ONE;
    return 1;
}

void parlay_ngram_free(Index *x) {
    if (!x) return;
    free(x->token), free(x->state), free(x->edge), free(x->slot), free(x);
}

/* NULL where there is no memory. */
Index *parlay_ngram_new(void) {
    Index *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    x->most_tokens = x->most_states = x->most_edges = x->slots = LEAST_SLOTS;
    x->token = malloc(LEAST_SLOTS * sizeof *x->token);
    x->state = malloc(LEAST_SLOTS * sizeof *x->state);
    x->edge = malloc(LEAST_SLOTS * sizeof *x->edge);
    x->slot = malloc(LEAST_SLOTS * sizeof *x->slot);
    if (!x->token || !x->state || !x->edge || !x->slot) {
        parlay_ngram_free(x);
        return NULL;
    }
    memset(x->slot, NOWHERE, LEAST_SLOTS * sizeof *x->slot);
    add_state(x, 0, FULL);
    x->state[0].link = NOWHERE, x->match_end = -1;
    return x;
}

/* Append to each of some indexes its count [indexes] of tokens, one index's after the other's;
   match [indexes]: out, how long a match each ends with. 0 where there is no memory. */
int parlay_ngram_extend(
    Index *const *index, int64_t indexes, const int32_t *count, const int32_t *token, int32_t *match
) {
    for (int64_t i = 0; i < indexes; i++) {
        for (int32_t j = 0; j < count[i]; j++)
            if (!append(index[i], *token++)) return 0;
        match[i] = index[i]->match_tokens;
    }
    return 1;
}

/* The k tokens that followed the longest suffix before; past the end the text repeats what follows
   it. Returns how many there are: none without a match. */
int32_t parlay_ngram_propose(const Index *x, int32_t k, int32_t *out) {
    if (!x->match_tokens) return 0;
    int64_t start = x->match_end + 1, period = x->tokens - start;
    for (int32_t i = 0; i < k; i++) out[i] = i < period ? x->token[start + i] : out[i - period];
    return k;
}
