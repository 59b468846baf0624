// Turns a film strip into a player: the private picture, one frame, the curve of the cost, a slider and a button.
// Without this script, and on paper, the strip stays as it is.
document.addEventListener("DOMContentLoaded", () => {
  const WAIT = 350; // milliseconds a frame

  const add = (parent, name, properties = {}, attributes = {}) => {
    const element = Object.assign(document.createElement(name), properties);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };

  const draw = (parent, name, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    parent.append(element);
    return element;
  };

  // The cost over the steps on a logarithmic scale. Returns what moves the mark to a frame.
  const chart = (parent, { curve, cuts, of, steps, cost }) => {
    const [left, right, top, bottom] = [52, 312, 24, 164];
    const costs = curve.map(([, value]) => value).filter((value) => value > 0);
    const [low, high] = [Math.log(Math.min(...costs) * 0.8), Math.log(Math.max(...costs) * 1.2)];
    const x = (step) => left + ((right - left) * step) / of;
    const y = (value) => bottom - ((bottom - top) * (Math.log(Math.max(value, Math.exp(low))) - low)) / (high - low);
    const svg = draw(parent, "svg", { viewBox: "0 0 320 206", role: "img" });
    svg.setAttribute("aria-label", "The cost over the steps, on a logarithmic scale, with a mark at the step shown");
    draw(svg, "path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` });
    for (const step of [0, ...cuts]) {
      if (step) draw(svg, "path", { class: "cut", d: `M${x(step)} ${top}V${bottom}` });
      draw(svg, "text", { x: x(step), y: bottom + 16, "text-anchor": "middle" }, step);
    }
    for (let power = -9; power < 4; power++)
      for (const digit of [1, 3]) {
        const value = Number(`${digit}e${power}`);
        if (Math.log(value) < low || Math.log(value) > high) continue;
        draw(svg, "path", { class: "axis", d: `M${left - 4} ${y(value)}h4` });
        draw(svg, "text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, value);
      }
    draw(svg, "text", { x: left - 44, y: 14 }, "cost");
    const below = { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" };
    draw(svg, "text", below, "step (dashed: steps get smaller)");
    draw(svg, "path", { class: "curve", d: `M${curve.map(([step, value]) => `${x(step)} ${y(value)}`).join("L")}` });
    const mark = draw(svg, "circle", { class: "mark", r: 6 });
    return (frame) => {
      mark.setAttribute("cx", x(steps[frame]));
      mark.setAttribute("cy", y(cost[frame]));
    };
  };

  const build = (table, figure, strip, sprite) => {
    const film = JSON.parse(table.dataset.film);
    const last = film.steps.length - 1;
    const player = document.createElement("div");
    player.className = "watch";
    player.setAttribute("role", "group");
    player.setAttribute("aria-label", `Film of ${table.dataset.of}`);
    add(player, "p", { className: "visually-hidden", textContent: strip.alt });

    const screen = add(player, "div", { className: "watch-screen" });
    const [truth, guess] = ["private", "search"].map((name) => {
      const box = add(screen, "div");
      const [, , width, height] = film.places[0];
      const canvas = add(box, "canvas", { width, height }, { role: "img", "aria-label": `The ${name} picture` });
      add(box, "span", { textContent: name });
      return canvas;
    });
    const paint = (canvas, place) =>
      canvas.getContext("2d").drawImage(sprite, ...place, 0, 0, canvas.width, canvas.height);
    const mark = chart(screen, film);

    const controls = add(player, "div", { className: "watch-controls" });
    const button = add(controls, "button", { type: "button" });
    const label = add(controls, "label");
    add(label, "span", { textContent: "Frame" });
    const slider = add(label, "input", { type: "range", min: 0, max: last, step: 1, value: last });
    const status = add(player, "output", {}, { "aria-live": "off" }); // the slider says the same

    const show = (frame) => {
      const [step, cost, psnr] = [film.steps, film.cost, film.psnr].map((values) => values[frame]);
      const said = `step ${step} of ${film.of}, cost ${cost}, PSNR ${psnr.toFixed(1)} dB`;
      paint(guess, film.places[frame + 1]);
      guess.setAttribute("aria-label", `The search at step ${step}`);
      slider.setAttribute("aria-valuetext", said);
      status.textContent = said;
      mark(frame);
    };

    let timer;
    const stop = () => {
      clearInterval(timer);
      timer = undefined;
      button.textContent = "Play";
    };
    const play = () => {
      if (Number(slider.value) === last) slider.value = 0;
      show(Number(slider.value));
      button.textContent = "Pause";
      timer = setInterval(() => {
        slider.value = Number(slider.value) + 1;
        const done = Number(slider.value) === last;
        status.setAttribute("aria-live", done ? "polite" : "off"); // at the end only, not at every frame
        show(Number(slider.value));
        if (done) stop();
      }, WAIT);
    };
    button.addEventListener("click", () => (timer ? stop() : play()));
    slider.addEventListener("input", () => {
      stop();
      status.setAttribute("aria-live", "off");
      show(Number(slider.value));
    });

    stop();
    paint(truth, film.places[0]);
    show(last);
    strip.after(player);
    figure.classList.add("watched");
  };

  for (const table of document.querySelectorAll("details.film")) {
    const figure = document.getElementById(table.dataset.figure);
    const strip = figure?.querySelector("img");
    if (!strip) continue;
    const sprite = new Image();
    sprite.src = strip.src;
    sprite.decode().then(() => build(table, figure, strip, sprite));
  }
});
