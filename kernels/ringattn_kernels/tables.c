/* The work that a batch never seen asks of its tile tables. `table.py`, `split_choice.py` and `hopper/` hold the same in NumPy, and say what each
   array means. Both give the same numbers in the same order. Arrays come as buffers of int32 or int64, and leave as bytearrays of int32. */

enum { ROW, FIRST_SEGMENT, LAST_SEGMENT, SPLIT, ITEM_COLUMNS };
enum { BEGIN, FULL_BEGIN, FULL_END, END, LO, HI, ROW_BEGIN, ROW_END, SEGMENT_COLUMNS };
/* a lower bound of a time is computed in another order than the time: the two may round this much apart */
#define ROUNDING 1e-9
/* of `work_queue.py` */
enum { WORK, BLOCK, SEGMENT, STEPS, BEFORE, AFTER, WORK_COLUMNS };
#define WARPGROUP_ROWS 64
#define IDLE_BITS 10

/* Items and segments, as `open_table` opens them; the segments of each item are there. */
static int open_blocks(PyObject *items, PyObject *segments, Py_buffer *of_items, Py_buffer *of_segments) {
  if (!open_table(items, of_items, 4, ITEM_COLUMNS) || !open_table(segments, of_segments, 4, SEGMENT_COLUMNS)) return 0;
  if (of_items->shape[1] != ITEM_COLUMNS) {
    PyErr_SetString(PyExc_ValueError, "items have four columns");
    return 0;
  }
  const int32_t *item = of_items->buf;
  for (Py_ssize_t i = 0; i < of_items->shape[0]; i++, item += ITEM_COLUMNS) {
    if (item[FIRST_SEGMENT] < 0 || item[FIRST_SEGMENT] > item[LAST_SEGMENT] || item[LAST_SEGMENT] > of_segments->shape[0]) {
      PyErr_Format(PyExc_ValueError, "item %zd has segments that are not there", i);
      return 0;
    }
  }
  return 1;
}

/* A bytearray for rows of int32, uninitialised. */
static PyObject *new_table(int64_t rows, int64_t columns) { return PyByteArray_FromStringAndSize(NULL, rows * columns * 4); }

static int32_t *rows_of(PyObject *table) { return (int32_t *)PyByteArray_AS_STRING(table); }

static int64_t steps_of_segment(const int32_t *segment, int64_t step) {
  int64_t columns = (int64_t)segment[END] - segment[BEGIN];
  return columns <= 0 ? 0 : step == 1 ? columns : parts(columns, step);
}

static int64_t steps_of_item(const int32_t *item, const int32_t *segments, Py_ssize_t width, int64_t step) {
  int64_t steps = 0;
  for (int64_t i = item[FIRST_SEGMENT]; i < item[LAST_SEGMENT]; i++) steps += steps_of_segment(segments + i * width, step);
  return steps;
}

/* ---- cut ---- */

typedef struct {
  int64_t begin, end, other_begin, other_end, lo, hi;
} Tile;

static Tile tile_at(const Py_buffer *tiles, Py_ssize_t row, int keys) {
  int64_t values[TILE_COLUMNS];
  for (int column = 0; column < TILE_COLUMNS; column++) values[column] = number_at(tiles, row, column);
  if (keys) return (Tile){values[2], values[3], values[0], values[1], -values[5], -values[4]};
  return (Tile){values[0], values[1], values[2], values[3], values[4], values[5]};
}

static int is_sound(const Py_buffer *tiles, Py_ssize_t row, int keys, int64_t rows) {
  for (int column = 0; column < TILE_COLUMNS; column++) {
    int64_t value = number_at(tiles, row, column);
    if (value < (column < 4 ? 0 : -LARGEST) || value > LARGEST) return 0;
  }
  Tile tile = tile_at(tiles, row, keys);
  return tile.begin < tile.end && tile.end <= rows;
}

typedef struct {
  const Py_buffer *tiles, *places; /* places: NULL if there are none */
  int keys;
  int64_t rows, block, step, align;
} Cut;

/* The rows of a tile within a block, and the columns that are live for some of them: the band's steps overlap, so that this is one interval. */
typedef struct {
  int64_t row_begin, row_end, begin, end;
} Part;

static inline Part part_of(const Cut *cut, const Tile *tile, int64_t block_begin, int64_t block_end) {
  Part part = {.row_begin = most(tile->begin, block_begin), .row_end = least(tile->end, block_end)};
  part.begin = most(tile->other_begin, part.row_begin - tile->hi);
  if (cut->align > 1) part.begin -= part.begin % cut->align;
  part.end = least(tile->other_end, part.row_end - tile->lo);
  return part;
}

/* Count each block's segments and steps. Returns the number of segments, -1 if a tile is not sound, -2 if there are too many. */
static int64_t count_segments(const Cut *cut, int64_t *segments, int64_t *steps) {
  int64_t all = 0;
  for (Py_ssize_t i = 0; i < cut->tiles->shape[0]; i++) {
    if (!is_sound(cut->tiles, i, cut->keys, cut->rows)) return -1;
    Tile tile = tile_at(cut->tiles, i, cut->keys);
    int64_t block = tile.begin / cut->block;
    for (int64_t begin = block * cut->block; begin < tile.end; begin += cut->block, block++) {
      Part part = part_of(cut, &tile, begin, least(begin + cut->block, cut->rows));
      if (part.begin >= part.end) continue;
      segments[block]++;
      steps[block] += cut->step == 1 ? part.end - part.begin : parts(part.end - part.begin, cut->step);
      if (++all >= LARGEST) return -2;
    }
  }
  return all;
}

/* Write each block's segments; place: where its next one goes. */
static void write_segments(const Cut *cut, int64_t *place, int32_t *segments) {
  Py_ssize_t more = cut->places == NULL ? 0 : cut->places->shape[1];
  for (Py_ssize_t i = 0; i < cut->tiles->shape[0]; i++) {
    Tile tile = tile_at(cut->tiles, i, cut->keys);
    int64_t block = tile.begin / cut->block;
    for (int64_t begin = block * cut->block; begin < tile.end; begin += cut->block, block++) {
      int64_t end = least(begin + cut->block, cut->rows);
      Part part = part_of(cut, &tile, begin, end);
      if (part.begin >= part.end) continue;
      /* columns that are live for every row of the block, in whole steps from the first column */
      int64_t before = most(end - 1 - tile.hi - part.begin, 0);
      int64_t until = most(least(part.end, begin - tile.lo + 1) - part.begin, 0);
      if (cut->step > 1) {
        before = parts(before, cut->step) * cut->step;
        until -= until % cut->step;
      }
      if (until <= before || part.row_end - part.row_begin != end - begin) before = until = 0;
      int32_t *segment = segments + place[block]++ * (SEGMENT_COLUMNS + more);
      segment[BEGIN] = (int32_t)part.begin;
      segment[FULL_BEGIN] = (int32_t)(part.begin + before);
      segment[FULL_END] = (int32_t)(part.begin + until);
      segment[END] = (int32_t)part.end;
      segment[LO] = (int32_t)tile.lo;
      segment[HI] = (int32_t)tile.hi;
      segment[ROW_BEGIN] = (int32_t)part.row_begin;
      segment[ROW_END] = (int32_t)part.row_end;
      for (Py_ssize_t column = 0; column < more; column++) segment[SEGMENT_COLUMNS + column] = (int32_t)number_at(cut->places, i, column);
    }
  }
}

/* cut(tiles, places or None, whether along the keys, rows, block, step, align): (items, segments), as `table.cut` */
static PyObject *cut_tiles(PyObject *self, PyObject *args) {
  PyObject *tiles, *places, *items = NULL, *segments = NULL, *result = NULL;
  Py_buffer of_tiles = {0}, of_places = {0};
  int64_t *counts = NULL;
  int keys;
  long long rows, block, step, align;
  if (!PyArg_ParseTuple(args, "OOpLLLL", &tiles, &places, &keys, &rows, &block, &step, &align)) return NULL;
  if (!in_range("rows", rows, 0) || !in_range("block", block, 1) || !in_range("step", step, 1) || !in_range("align", align, 1)) return NULL;
  if (!open_table(tiles, &of_tiles, 8, TILE_COLUMNS)) goto done;
  if (places != Py_None) {
    if (!open_table(places, &of_places, 8, 0)) goto done;
    if (of_places.shape[0] != of_tiles.shape[0] || of_places.shape[1] > MANY) {
      PyErr_SetString(PyExc_ValueError, "each tile has its places");
      goto done;
    }
  }
  Cut cut = {&of_tiles, places == Py_None ? NULL : &of_places, keys, rows, block, step, align};
  int64_t blocks = parts(rows, block), width = SEGMENT_COLUMNS + (cut.places == NULL ? 0 : of_places.shape[1]);
  counts = calloc(5 * blocks + 1, sizeof(int64_t));
  if (counts == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  /* of each block: where its segments are, its steps, and its place among the items */
  int64_t *first = counts, *steps = first + blocks + 1, *place = steps + blocks, *order = place + blocks, *spare = order + blocks;
  PyThreadState *thread = release(of_tiles.shape[0] * width + blocks);
  int64_t all = count_segments(&cut, first + 1, steps);
  resume(thread);
  if (all < 0) {
    PyErr_SetString(PyExc_ValueError, all == -1 ? "a tile leaves the rows, or 32 bits" : "there are 2**31 segments or more");
    goto done;
  }
  items = new_table(blocks, ITEM_COLUMNS);
  segments = new_table(all, width);
  if (items == NULL || segments == NULL) goto done;

  int32_t *item = rows_of(items), *segment = rows_of(segments);
  thread = release(all * width + blocks);
  for (int64_t i = 0; i < blocks; i++) {
    first[i + 1] += first[i];
    place[i] = first[i];
  }
  write_segments(&cut, place, segment);
  sort_falling(steps, blocks, order, spare);
  for (int64_t i = 0; i < blocks; i++, item += ITEM_COLUMNS) {
    int64_t block_number = order[i];
    item[ROW] = (int32_t)(block_number * block);
    item[FIRST_SEGMENT] = (int32_t)first[block_number];
    item[LAST_SEGMENT] = (int32_t)first[block_number + 1];
    item[SPLIT] = 0;
  }
  resume(thread);
  result = PyTuple_Pack(2, items, segments);

done:
  Py_XDECREF(items);
  Py_XDECREF(segments);
  free(counts);
  PyBuffer_Release(&of_tiles);
  PyBuffer_Release(&of_places);
  return result;
}

/* ---- split ---- */

/* The first step of split `number` of an item of so many steps in so many splits: steps * number / count without overflow. */
static int64_t first_step(int64_t steps, int64_t count, int64_t number) { return steps / count * number + steps % count * number / count; }

/* Cut the segments of an item into pieces, which begin where a segment does or a split. `pieces` counts those of each segment, or,
   if there is memory for them, says where its first one goes; then the splits are written, too. */
static void walk_item(const int32_t *item, const int32_t *segments, Py_ssize_t width, int64_t step, int64_t steps, int64_t count,
                      int64_t *pieces, int32_t *written, int32_t *splits) {
  int64_t segment = item[FIRST_SEGMENT], begin = 0; /* the segment at hand, and its first step */
  int64_t of_segment = segment < item[LAST_SEGMENT] ? steps_of_segment(segments + segment * width, step) : 0, inside = 0;
  for (int64_t number = 0; number < count; number++) {
    int64_t at = first_step(steps, count, number), end = first_step(steps, count, number + 1), first = -1, next = 0;
    while (at < end && segment < item[LAST_SEGMENT]) {
      int64_t until = least(end, begin + of_segment);
      if (written == NULL) {
        pieces[segment]++;
      } else {
        const int32_t *source = segments + segment * width;
        int64_t place = pieces[segment] + inside++;
        int32_t *piece = written + place * width;
        if (first < 0) first = place;
        next = place + 1;
        memcpy(piece, source, width * sizeof(int32_t));
        int64_t from = source[BEGIN] + (at - begin) * step, to = least(source[END], from + (until - at) * step);
        piece[BEGIN] = (int32_t)from;
        piece[END] = (int32_t)to;
        piece[FULL_BEGIN] = (int32_t)least(most(source[FULL_BEGIN], from), to);
        piece[FULL_END] = (int32_t)least(most(source[FULL_END], from), to);
      }
      at = until;
      if (at == begin + of_segment) {
        begin = at;
        inside = 0;
        segment++;
        of_segment = segment < item[LAST_SEGMENT] ? steps_of_segment(segments + segment * width, step) : 0;
      }
    }
    if (written != NULL) {
      int32_t *one = splits + number * ITEM_COLUMNS;
      one[ROW] = item[ROW];
      one[FIRST_SEGMENT] = (int32_t)first;
      one[LAST_SEGMENT] = (int32_t)next;
      one[SPLIT] = (int32_t)number;
    }
  }
}

/* split(items, segments, step, splits): (items, segments), as `table.split` */
static PyObject *split_items(PyObject *self, PyObject *args) {
  PyObject *items, *segments, *split = NULL, *pieces = NULL, *result = NULL;
  Py_buffer of_items = {0}, of_segments = {0};
  int64_t *memory = NULL, *sizes = NULL;
  int32_t *unsorted = NULL;
  long long step, splits;
  if (!PyArg_ParseTuple(args, "OOLL", &items, &segments, &step, &splits)) return NULL;
  if (!in_range("step", step, 1) || !in_range("splits", splits, 1)) return NULL;
  if (!open_blocks(items, segments, &of_items, &of_segments)) goto done;
  Py_ssize_t item_count = of_items.shape[0], segment_count = of_segments.shape[0], width = of_segments.shape[1];
  const int32_t *from_items = of_items.buf, *from_segments = of_segments.buf;
  memory = calloc(2 * item_count + segment_count + 1, sizeof(int64_t));
  if (memory == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  int64_t *steps = memory, *counts = steps + item_count, *place = counts + item_count, longest = 1, all = 0, all_pieces = 0;
  for (Py_ssize_t i = 0; i < item_count; i++) {
    steps[i] = steps_of_item(from_items + i * ITEM_COLUMNS, from_segments, width, step);
    longest = most(longest, steps[i]);
  }
  int64_t limit = parts(longest, splits);
  for (Py_ssize_t i = 0; i < item_count; i++) {
    const int32_t *item = from_items + i * ITEM_COLUMNS;
    counts[i] = parts(steps[i], limit);
    all += counts[i];
    if (all < LARGEST) walk_item(item, from_segments, width, step, steps[i], counts[i], place, NULL, NULL);
  }
  for (Py_ssize_t i = 0; i < segment_count; i++) {
    int64_t there = place[i];
    place[i] = all_pieces;
    all_pieces += there;
  }
  if (all >= LARGEST || all_pieces >= LARGEST) {
    PyErr_SetString(PyExc_ValueError, "there are 2**31 splits or more");
    goto done;
  }
  split = new_table(all, ITEM_COLUMNS);
  pieces = new_table(all_pieces, width);
  unsorted = malloc(all * ITEM_COLUMNS * sizeof(int32_t) + 1);
  sizes = malloc(3 * all * sizeof(int64_t) + 1);
  if (split == NULL || pieces == NULL) goto done;
  if (unsorted == NULL || sizes == NULL) {
    PyErr_NoMemory();
    goto done;
  }

  int32_t *to_items = rows_of(split), *to_segments = rows_of(pieces);
  int64_t *order = sizes + all, *spare = order + all, written = 0;
  PyThreadState *thread = release(all_pieces * width);
  for (Py_ssize_t i = 0; i < item_count; i++) {
    const int32_t *item = from_items + i * ITEM_COLUMNS;
    walk_item(item, from_segments, width, step, steps[i], counts[i], place, to_segments, unsorted + written * ITEM_COLUMNS);
    for (int64_t number = 0; number < counts[i]; number++) {
      sizes[written++] = first_step(steps[i], counts[i], number + 1) - first_step(steps[i], counts[i], number);
    }
  }
  sort_falling(sizes, all, order, spare);
  for (int64_t i = 0; i < all; i++) {
    memcpy(to_items + i * ITEM_COLUMNS, unsorted + order[i] * ITEM_COLUMNS, ITEM_COLUMNS * sizeof(int32_t));
  }
  resume(thread);
  result = PyTuple_Pack(2, split, pieces);

done:
  Py_XDECREF(split);
  Py_XDECREF(pieces);
  free(memory);
  free(unsorted);
  free(sizes);
  PyBuffer_Release(&of_items);
  PyBuffer_Release(&of_segments);
  return result;
}

/* ---- choose ---- */

typedef struct {
  double time;
  int64_t times; /* how many splits take so long, in all heads */
} Splits;

typedef struct {
  const int64_t *steps; /* of the items that have some */
  int64_t count, longest, heads, processors, walks;
  double split_cost, merge_cost;
  Splits *splits;   /* memory for `count` of them */
  double *together; /* memory for the time of each multiprocessor */
} Items;

static int longer_first(const void *a, const void *b) {
  double first = ((const Splits *)a)->time, second = ((const Splits *)b)->time;
  return (first < second) - (first > second);
}

/* `split_choice.predicted`: infinite if it is more than `enough` beyond doubt. */
static double predicted(const Items *items, int64_t splits, double enough) {
  int64_t limit = parts(items->longest, splits), pieces = 0, steps = 0;
  double split_cost = splits > 1 ? items->split_cost : 0.0, merge_cost = splits > 1 ? items->merge_cost : 0.0;
  int sorted = 1;
  for (int64_t i = 0; i < items->count; i++) {
    int64_t count = parts(items->steps[i], limit);
    double each = (double)(items->steps[i] * items->walks) / (double)count;
    items->splits[i] = (Splits){each + split_cost, count * items->heads};
    sorted &= i == 0 || items->splits[i - 1].time >= items->splits[i].time;
    pieces += count;
    steps += items->steps[i];
  }
  /* the last multiprocessor is not done before the mean of all */
  double mean = ((double)steps * (double)items->walks + split_cost * (double)pieces) * (double)items->heads / (double)items->processors;
  if ((mean + merge_cost) * (1.0 - ROUNDING) > enough) return INFINITY;
  if (!sorted) qsort(items->splits, items->count, sizeof(Splits), longer_first);
  memset(items->together, 0, items->processors * sizeof(double));
  int64_t round = 0, place = 0;
  for (int64_t i = 0; i < items->count; i++) {
    double time = items->splits[i].time;
    for (int64_t left = items->splits[i].times; left > 0;) {
      int64_t taken = least(left, items->processors - place);
      /* whoever took the longest of a round takes the shortest of the next */
      double *taker = items->together + (round % 2 ? items->processors - place - taken : place);
      for (int64_t j = 0; j < taken; j++) taker[j] += time;
      left -= taken;
      place += taken;
      if (place == items->processors) {
        place = 0;
        round++;
      }
    }
  }
  double last = 0.0;
  for (int64_t j = 0; j < items->processors; j++) last = items->together[j] > last ? items->together[j] : last;
  return last + merge_cost;
}

/* choose(items, segments, step, rows, block, heads, walks, processors, splits or 0, (cost of a split, of a merge, steps of the shortest, splits
   of a processor)): (splits of the longest, items with a step, all steps, time, blocks as in `splits.Splits` or None), as
   `split_choice.choose` */
static PyObject *choose_splits(PyObject *self, PyObject *args) {
  PyObject *items, *segments, *blocks = NULL, *result = NULL;
  Py_buffer of_items = {0}, of_segments = {0};
  int64_t *steps = NULL;
  Items given = {0};
  long long step, rows, block, heads, walks, processors, wanted, shortest, per_processor;
  if (!PyArg_ParseTuple(args, "OOLLLLLLL(ddLL)", &items, &segments, &step, &rows, &block, &heads, &walks, &processors, &wanted,
                        &given.split_cost, &given.merge_cost, &shortest, &per_processor)) {
    return NULL;
  }
  if (!in_range("step", step, 1) || !in_range("rows", rows, 0) || !in_range("block", block, 1) || !in_range("heads", heads, 0) ||
      !in_range("walks", walks, 1) || !in_range("processors", processors, 1) || !in_range("splits", wanted, 0) ||
      !in_range("shortest", shortest, 1) || !in_range("splits of a processor", per_processor, 0)) {
    return NULL;
  }
  if (!open_blocks(items, segments, &of_items, &of_segments)) goto done;
  Py_ssize_t item_count = of_items.shape[0], width = of_segments.shape[1];
  const int32_t *from_items = of_items.buf;
  steps = malloc(item_count * sizeof(int64_t) + 1);
  given.splits = malloc(item_count * sizeof(Splits) + 1);
  given.together = malloc(processors * sizeof(double));
  if (steps == NULL || given.splits == NULL || given.together == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  int64_t all_steps = 0;
  PyThreadState *thread = release(of_segments.shape[0] * width + item_count * heads);
  for (Py_ssize_t i = 0; i < item_count; i++) {
    steps[given.count] = steps_of_item(from_items + i * ITEM_COLUMNS, of_segments.buf, width, step);
    given.longest = most(given.longest, steps[given.count]);
    all_steps += steps[given.count];
    given.count += steps[given.count] > 0;
  }
  given.steps = steps;
  given.heads = heads;
  given.processors = processors;
  given.walks = walks;
  int64_t count = most(wanted, 1), found = 1;
  double time = 0.0;
  int too_long = given.longest > INT64_MAX / walks;
  if (given.count > 0 && !too_long) {
    time = predicted(&given, count, INFINITY);
    if (wanted == 0) {
      int64_t last = least(given.longest, per_processor * processors / most(1, heads * given.count));
      last = least(last, (int64_t)least(LARGEST, given.longest * walks / shortest));
      for (int64_t splits = 2; splits <= last; splits++) {
        double other = predicted(&given, splits, time);
        if (other < time) {
          time = other;
          count = splits;
        }
      }
    }
    found = parts(given.longest, parts(given.longest, count));
  }
  resume(thread);
  if (too_long) {
    PyErr_SetString(PyExc_ValueError, "an item has too many steps");
    goto done;
  }
  if (found > 1) {
    int64_t all = parts(rows, block), next = 0, limit = parts(given.longest, count);
    blocks = new_table(all, 2);
    if (blocks == NULL) goto done;
    int64_t *counts = calloc(all + 1, sizeof(int64_t));
    if (counts == NULL) {
      PyErr_NoMemory();
      goto done;
    }
    for (Py_ssize_t i = 0; i < item_count; i++) {
      int64_t number = from_items[i * ITEM_COLUMNS + ROW] / block;
      if (number < 0 || number >= all) continue;
      counts[number] += parts(steps_of_item(from_items + i * ITEM_COLUMNS, of_segments.buf, width, step), limit);
    }
    int32_t *to = rows_of(blocks);
    for (int without = 0; without < 2; without++) {
      for (int64_t i = 0; i < all; i++) {
        if ((counts[i] == 0) != without) continue;
        to[2 * next] = (int32_t)(i * block);
        to[2 * next++ + 1] = (int32_t)counts[i];
      }
    }
    free(counts);
  }
  result = Py_BuildValue("(LLLdO)", (long long)found, (long long)given.count, (long long)all_steps, time, blocks == NULL ? Py_None : blocks);

done:
  Py_XDECREF(blocks);
  free(steps);
  free(given.splits);
  free(given.together);
  PyBuffer_Release(&of_items);
  PyBuffer_Release(&of_segments);
  return result;
}

/* ---- order ---- */

/* `work_queue._held_back` */
static int64_t held_back(const int64_t *steps, int64_t count, int64_t heads, int64_t processors) {
  int64_t longest = 0, all = 0, so_far = 0, held = 0;
  for (int64_t i = 0; i < count; i++) {
    longest = most(longest, steps[i]);
    all += steps[i];
  }
  double enough = (double)processors * (double)longest / (double)heads, part = (double)all / 20.0;
  if (part < enough) enough = part;
  for (int64_t i = count - 1; i >= 0; i--) {
    so_far += steps[i];
    held += (double)so_far <= enough && steps[i] <= longest / 4;
  }
  return held;
}

/* `work_queue.idle_steps` of one item, which has `steps` */
static void write_idle_steps(
  const int32_t *item, const int32_t *segments, Py_ssize_t width, int64_t step, int64_t warpgroups, int64_t steps, int32_t *work
) {
  work[BEFORE] = work[AFTER] = 0;
  for (int64_t warpgroup = 0; warpgroup < warpgroups; warpgroup++) {
    int64_t row = item[ROW] + warpgroup * WARPGROUP_ROWS, passed = 0, first = -1, last = -1;
    for (int64_t i = item[FIRST_SEGMENT]; i < item[LAST_SEGMENT]; i++) {
      const int32_t *segment = segments + i * width;
      int64_t first_row = most(row, segment[ROW_BEGIN]), last_row = least(row + WARPGROUP_ROWS, segment[ROW_END]) - 1;
      int64_t left = most(segment[BEGIN], first_row - segment[HI]), right = least((int64_t)segment[END] - 1, last_row - segment[LO]);
      if (first_row <= last_row && left <= right) {
        if (first < 0) first = passed + (left - segment[BEGIN]) / step;
        last = passed + (right - segment[BEGIN]) / step;
      }
      passed += steps_of_segment(segment, step);
    }
    int64_t before = most(first, 0), after = most(steps - 1 - most(last, 0), 0), bits = warpgroup * IDLE_BITS;
    work[BEFORE] |= (int32_t)(least(before, (1 << IDLE_BITS) - 1) << bits);
    work[AFTER] |= (int32_t)(least(after, (1 << IDLE_BITS) - 1) << bits);
  }
}

/* Write the works of the items [first, last) and heads [head, last_head), item by item. Returns where the next ones go. */
static int32_t *write_works(const int32_t *works, int64_t first, int64_t last, int64_t head, int64_t last_head, int32_t *to) {
  for (int64_t i = first; i < last; i++) {
    const int32_t *work = works + i * WORK_COLUMNS;
    for (int64_t number = head; number < last_head; number++, to += WORK_COLUMNS) {
      memcpy(to, work, WORK_COLUMNS * sizeof(int32_t));
      to[WORK] += (int32_t)number;
    }
  }
  return to;
}

/* order(items, segments, step, warpgroups, heads, together, whether touched only, processors): (works, segments), as `work_queue.order_works` */
static PyObject *order_works(PyObject *self, PyObject *args) {
  PyObject *items, *segments, *works = NULL, *with_empty = NULL, *result = NULL;
  Py_buffer of_items = {0}, of_segments = {0};
  int64_t *steps = NULL;
  int32_t *blocks = NULL;
  int touched_only;
  long long step, warpgroups, heads, together, processors;
  if (!PyArg_ParseTuple(
        args, "OOLLLLpL", &items, &segments, &step, &warpgroups, &heads, &together, &touched_only, &processors
      )) {
    return NULL;
  }
  if (warpgroups < 1 || warpgroups > 31 / IDLE_BITS) {
    PyErr_Format(PyExc_ValueError, "warpgroups is %lld, not in [1, %d]", warpgroups, 31 / IDLE_BITS);
    return NULL;
  }
  if (!in_range("step", step, 1) || !in_range("heads", heads, 1) || !in_range("together", together, 1) ||
      !in_range("processors", processors, 1)) {
    return NULL;
  }
  if (!open_blocks(items, segments, &of_items, &of_segments)) goto done;
  int64_t item_count = of_items.shape[0], segment_count = of_segments.shape[0], width = of_segments.shape[1], count = 0;
  if (item_count * heads >= LARGEST) {
    PyErr_SetString(PyExc_ValueError, "there are 2**31 works or more");
    goto done;
  }
  steps = malloc(item_count * sizeof(int64_t) + 1);
  blocks = malloc(item_count * WORK_COLUMNS * sizeof(int32_t) + 1);
  if (steps == NULL || blocks == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  /* the works of the first head */
  const int32_t *item = of_items.buf;
  for (int64_t i = 0; i < item_count; i++, item += ITEM_COLUMNS) {
    int64_t found = steps_of_item(item, of_segments.buf, width, step);
    if (touched_only && found == 0) continue;
    int32_t *work = blocks + count * WORK_COLUMNS;
    work[WORK] = (int32_t)(item[SPLIT] * heads);
    work[BLOCK] = item[ROW];
    work[SEGMENT] = (int32_t)(found > 0 ? item[FIRST_SEGMENT] : segment_count);
    work[STEPS] = (int32_t)most(found, 1);
    write_idle_steps(item, of_segments.buf, width, step, warpgroups, found, work);
    steps[count++] = found;
  }
  works = new_table(count * heads, WORK_COLUMNS);
  with_empty = new_table(segment_count + 1, width);
  if (works == NULL || with_empty == NULL) goto done;

  int32_t *to = rows_of(works), *empty = rows_of(with_empty) + segment_count * width;
  PyThreadState *thread = release(count * heads * WORK_COLUMNS + segment_count * width);
  int64_t kept = count - held_back(steps, count, heads, processors);
  /* so many heads at a time, the first time what is left of them; at last the works that are held back */
  int64_t until = (heads - 1) % together + 1;
  for (int64_t head = 0; head < heads; head = until, until += together) to = write_works(blocks, 0, kept, head, until, to);
  write_works(blocks, kept, count, 0, heads, to);
  memcpy(rows_of(with_empty), of_segments.buf, segment_count * width * sizeof(int32_t));
  memset(empty, 0, width * sizeof(int32_t));
  empty[END] = 1;
  resume(thread);
  result = PyTuple_Pack(2, works, with_empty);

done:
  Py_XDECREF(works);
  Py_XDECREF(with_empty);
  free(steps);
  free(blocks);
  PyBuffer_Release(&of_items);
  PyBuffer_Release(&of_segments);
  return result;
}

/* ---- turns ---- */

typedef struct {
  int32_t *pieces, *successors;
  int64_t count, room;
  Py_ssize_t width;
} Pieces;

/* Add a copy of a segment with another begin and end. Returns 0 if there is no memory. */
static int add_piece(Pieces *pieces, const int32_t *segment, int64_t begin, int64_t end, int64_t successor) {
  if (pieces->count == pieces->room) {
    int64_t room = 2 * pieces->room + 64;
    int32_t *more = realloc(pieces->pieces, room * pieces->width * sizeof(int32_t));
    if (more == NULL) return 0;
    pieces->pieces = more;
    more = realloc(pieces->successors, room * sizeof(int32_t));
    if (more == NULL) return 0;
    pieces->successors = more;
    pieces->room = room;
  }
  int32_t *piece = pieces->pieces + pieces->count * pieces->width;
  memcpy(piece, segment, pieces->width * sizeof(int32_t));
  piece[BEGIN] = (int32_t)begin;
  piece[END] = (int32_t)end;
  pieces->successors[pieces->count++] = (int32_t)successor;
  return 1;
}

/* Cut a segment of an item where the item that follows is another; `following` holds it for each block of steps, -1 if nobody follows. */
static int add_pieces(Pieces *pieces, const int32_t *segment, int64_t step, int32_t *following, int32_t item) {
  int64_t begin = segment[BEGIN], successor = -1, last = parts(segment[END], step);
  for (int64_t block = begin / step; block < last; block++) {
    if (following[block] >= 0 && following[block] != successor) {
      /* where no item follows, any number will do */
      if (successor >= 0) {
        if (!add_piece(pieces, segment, begin, block * step, successor)) return 0;
        begin = block * step;
      }
      successor = following[block];
    }
    following[block] = item;
  }
  return add_piece(pieces, segment, begin, segment[END], most(successor, 0));
}

/* turns(items, segments, rows, step): (items, segments, successors, first), as `turns.take_turns` */
static PyObject *take_turns(PyObject *self, PyObject *args) {
  PyObject *items, *segments, *tables[4] = {NULL}, *result = NULL;
  Py_buffer of_items = {0}, of_segments = {0};
  int32_t *following = NULL;
  Pieces pieces = {0};
  long long rows, step;
  if (!PyArg_ParseTuple(args, "OOLL", &items, &segments, &rows, &step)) return NULL;
  if (!in_range("rows", rows, 0) || !in_range("step", step, 1)) return NULL;
  if (!open_blocks(items, segments, &of_items, &of_segments)) goto done;
  int64_t item_count = of_items.shape[0], segment_count = of_segments.shape[0], blocks = parts(rows, step);
  const int32_t *from_items = of_items.buf, *from_segments = of_segments.buf;
  pieces.width = of_segments.shape[1];
  for (int64_t i = 0; i < segment_count; i++) {
    const int32_t *segment = from_segments + i * pieces.width;
    if (segment[BEGIN] < 0 || segment[END] < 0 || segment[END] > rows) {
      PyErr_Format(PyExc_ValueError, "segment %lld leaves the rows", (long long)i);
      goto done;
    }
  }
  tables[0] = new_table(item_count, ITEM_COLUMNS);
  tables[3] = new_table(blocks, 1);
  following = malloc(blocks * sizeof(int32_t) + 1);
  if (tables[0] == NULL || tables[3] == NULL) goto done;
  if (following == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  int32_t *to_items = rows_of(tables[0]), *first = rows_of(tables[3]);
  memset(following, -1, blocks * sizeof(int32_t));
  int there = 1;
  PyThreadState *thread = release(segment_count * pieces.width + blocks);
  /* from the last item to the first: what is known so far is which item comes next */
  for (int64_t i = item_count - 1; i >= 0 && there; i--) {
    const int32_t *item = from_items + i * ITEM_COLUMNS;
    int32_t *to = to_items + i * ITEM_COLUMNS;
    memcpy(to, item, ITEM_COLUMNS * sizeof(int32_t));
    to[FIRST_SEGMENT] = (int32_t)pieces.count;
    for (int64_t segment = item[FIRST_SEGMENT]; segment < item[LAST_SEGMENT] && there; segment++) {
      there = pieces.count < LARGEST - blocks && add_pieces(&pieces, from_segments + segment * pieces.width, step, following, (int32_t)i);
    }
    to[LAST_SEGMENT] = (int32_t)pieces.count;
  }
  for (int64_t i = 0; i < blocks; i++) first[i] = following[i] < 0 ? 0 : following[i];
  resume(thread);
  if (!there) {
    PyErr_NoMemory();
    goto done;
  }
  tables[1] = new_table(pieces.count, pieces.width);
  tables[2] = new_table(pieces.count, 1);
  if (tables[1] == NULL || tables[2] == NULL) goto done;
  if (pieces.count) {
    memcpy(rows_of(tables[1]), pieces.pieces, pieces.count * pieces.width * sizeof(int32_t));
    memcpy(rows_of(tables[2]), pieces.successors, pieces.count * sizeof(int32_t));
  }
  result = PyTuple_Pack(4, tables[0], tables[1], tables[2], tables[3]);

done:
  for (int i = 0; i < 4; i++) Py_XDECREF(tables[i]);
  free(following);
  free(pieces.pieces);
  free(pieces.successors);
  PyBuffer_Release(&of_items);
  PyBuffer_Release(&of_segments);
  return result;
}

static PyMethodDef methods[] = {
    {"cut", cut_tiles, METH_VARARGS, "Items and segments of tiles."},
    {"split", split_items, METH_VARARGS, "Items and segments of which none is longer than a split of the longest."},
    {"choose", choose_splits, METH_VARARGS, "How many splits there are, and how long they take."},
    {"order", order_works, METH_VARARGS, "Works in the order in which programs take them."},
    {"turns", take_turns, METH_VARARGS, "Segments of which each has one item that follows."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ringattn_tables", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ringattn_tables(void) { return PyModule_Create(&definition); }
