// The site puts this before the theme's search worker, which takes each word of a query for the beginning of a word: "a" for
// all words with an a. So words that most questions have are left out, and endings, so that "killed" finds "kills".
(() => {
  const common = new Set(`a about after again all am an and any are as at be been but by can could did do does for from get had
    happen happens has have he how i if in into is it its me mean means my no not of on or our run set she should so than that
    the their them then there these they this those to up use used uses using was we were what when where which while whom why
    will with would you your`.split(/\s+/));

  const rewritten = (query) => {
    if (/["+~^:*]/.test(query)) return query; // in the search's own language
    const words = query.replace(/[?!.,;`]+(?=\s|$)|`/g, "").replace(/'s\b/g, "").split(/\s+/);
    const telling = words.filter((word) => word && !common.has(word.toLowerCase()));
    if (!telling.length) return query;
    return telling.map((word) => /^[a-z]{5,}$/i.test(word) ? word.replace(/(?<=...)(?:ing|ed|e?s|e)$/, "") : word).join(" ");
  };

  const listen = self.addEventListener.bind(self);
  self.addEventListener = (name, listener, options) => listen(name, name !== "message" ? listener : (event) => {
    const { type, data } = event.data;
    return listener(type === 2 ? { data: { type, data: rewritten(data) } } : event);
  }, options);
})();
