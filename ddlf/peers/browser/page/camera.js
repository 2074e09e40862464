// The camera: a button for each class takes a picture with this label.

const byId = (id) => document.getElementById(id);
const SENTENCES = {
  NotAllowedError: ["This browser was not allowed to use the camera.", "Allow it in the address bar, or choose pictures from files."],
  NotFoundError: ["This device has no camera.", "Choose pictures from files."],
  NotReadableError: ["Another program uses the camera.", "Close it, then press Camera again."],
};

export class Camera {
  #stream = null;

  // `take` gets the video and a class number.
  constructor({ count, nameOf, take, fail }) {
    Object.assign(this, { take, fail, video: byId("video") });
    byId("camera").onclick = () => this.on();
    byId("camera-off").onclick = () => { this.off(); byId("camera").focus(); };
    byId("shots").replaceChildren(...[...Array(count).keys()].map((number) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: nameOf(number), disabled: true });
      button.setAttribute("aria-label", `Take a picture of class ${nameOf(number)}`);
      button.onclick = () => this.take(this.square(), number);
      return button;
    }));
  }

  async on() {
    if (!navigator.mediaDevices?.getUserMedia) return this.fail("A browser gives its camera only to pages with https.", "Ask the server's owner for --proxy or a certificate, or choose files.");
    try {
      this.#stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: 640, height: 640 }, audio: false });
    } catch (error) {
      return this.fail(...(SENTENCES[error.name] ?? [`The camera cannot be used (${error.name}).`, "Choose pictures from files."]));
    }
    this.video.srcObject = this.#stream;
    byId("viewfinder").hidden = false;
    await this.video.play();
    this.enable(true);
  }

  enable(isOn) {
    for (const button of byId("shots").children) button.disabled = !isOn;
  }

  // Return the middle of the picture, as large as it can be.
  square() {
    const { videoWidth: width, videoHeight: height } = this.video, side = Math.min(width, height);
    const canvas = Object.assign(document.createElement("canvas"), { width: side, height: side });
    canvas.getContext("2d").drawImage(this.video, (width - side) / 2, (height - side) / 2, side, side, 0, 0, side, side);
    return canvas;
  }

  off() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = this.video.srcObject = null;
    byId("viewfinder").hidden = true;
    this.enable(false);
  }
}
